// Writing into the ordinary memory of another process (process_vm_writev), in a way that its owner can
// revoke.
//
// A process can be stopped at any instruction (a debugger, a frozen control group, SIGSTOP) and continue an
// hour later, when the others have given it up and reuse their memory. So the target is not decided by the
// stopped process: the kernel reads it, when the system call begins, from CommBlock::push, which is shared. A
// rank that needs its memory breaks the group and then sets the lengths there to 0. A call that has not begun
// by then writes nothing, whenever it is made; one that has begun cannot be interrupted, and is waited for.
//
//   writer:  store lengths, number; load permission; process_vm_writev(lengths)
//   owner:   revoke permission (broken, given_up); store lengths = 0; wait until no push to it is in progress
//
// All of these are sequentially consistent. If the writer still found the permission, its lengths were stored
// before the owner cleared them, so the owner's zeros are the last value and a later system call writes
// nothing.
//
// How the owner knows that a call has ended although the writer does not say so, since it was stopped on its
// way out: the last bytes that the kernel writes are the number of the push, into the owner's block. And a
// thread that is stopped, or in another system call, or in none, is not in this one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "lockstep/host/internal/buffer_ref.h"
#include "lockstep/host/internal/comm_members.h"

namespace lockstep::comm::internal {

// What a push depends on: words that are not 0 once it is revoked.
struct Permission {
  const std::atomic<std::uint32_t>& broken;
  const std::atomic<std::uint32_t>* given_up = nullptr;

  bool holds() const {
    return broken.load(std::memory_order_seq_cst) == 0 &&
           (given_up == nullptr || given_up->load(std::memory_order_seq_cst) == 0);
  }
};

// Copies to another rank's buffer, mapped here or not; `whole` as for copy(). False when it was revoked: the
// bytes may be there or not. Raises as copy() does. One at a time per communicator.
bool put(CommMembers& members, const BufferRef& to, const void* from, std::uint64_t n_bytes,
         std::uint64_t whole, const Permission& permission);

// For a rank that needs its memory. Pre: no permission of `rank` for it holds any more. Returns when `rank`
// does not write there and never will: at the latest when it is out of the buffer (`inside` is false).
void call_back(CommMembers& members, int rank, const std::function<bool()>& inside);

// Of this process, as a number; 0 when the kernel does not tell.
std::uint64_t own_pid_namespace();
// Whether call_back() will see what a stopped thread of the peer is doing.
bool calls_are_visible(const Peer& peer);

}  // namespace lockstep::comm::internal
