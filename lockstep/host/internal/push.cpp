#include "lockstep/host/internal/push.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/host/internal/perturb.h"

namespace lockstep::comm::internal {
namespace {

static_assert(sizeof(Push::Part) == sizeof(iovec) && offsetof(Push::Part, at) == offsetof(iovec, iov_base) &&
              offsetof(Push::Part, n_bytes) == offsetof(iovec, iov_len));
static_assert(offsetof(Push, bytes) == 0 && offsetof(Push, receipt) == sizeof(iovec));

int target_of(std::uint64_t number) {
  return static_cast<int>(number & ((1u << kPushRankBits) - 1));
}

// Address, in its own process, of the receipt that `rank` has for this rank.
std::uint64_t receipt_address(CommMembers& members, int rank) {
  CommBlock& block = members.block(rank);
  const auto* receipt = reinterpret_cast<const std::uint8_t*>(block.receipts() + members.rank());
  return block.address + static_cast<std::uint64_t>(receipt - reinterpret_cast<const std::uint8_t*>(&block));
}

// Fills in CommBlock::push; returns the push's number. This rank alone stores the number, the thread and the
// addresses, and makes one push at a time, so it may load its own number relaxed. Thread and addresses are
// stored relaxed: the store of the number releases them to call_back(), and the kernel reads the addresses in
// this thread. Lengths and number are sequentially consistent, before the load of the permission (push.h): an
// owner that still loads the previous number, after it has revoked the permission, knows that this push will
// find it revoked.
std::uint64_t announce(Push& push, const BufferRef& to, std::uint64_t n_bytes, std::uint64_t receipt_at) {
  const std::uint64_t count = (push.number.load(std::memory_order_relaxed) >> kPushRankBits) + 1;
  const std::uint64_t number = count << kPushRankBits | static_cast<std::uint64_t>(to.rank);
  push.thread.store(::gettid(), std::memory_order_relaxed);
  push.bytes.at.store(to.there, std::memory_order_relaxed);
  push.receipt.at.store(receipt_at, std::memory_order_relaxed);
  push.receipt.n_bytes.store(sizeof(number), std::memory_order_seq_cst);
  push.bytes.n_bytes.store(n_bytes, std::memory_order_seq_cst);
  push.number.store(number, std::memory_order_seq_cst);
  return number;
}

bool push_all(CommMembers& members, BufferRef to, const std::uint8_t* from, std::uint64_t n_bytes,
              const Permission& permission) {
  Push& push = members.own().push;
  const std::uint64_t receipt_at = receipt_address(members, to.rank);
  while (n_bytes > 0) {
    std::uint64_t number = announce(push, to, n_bytes, receipt_at);
    if (!permission.holds()) return false;
    before_touch();
    const iovec local[] = {{const_cast<std::uint8_t*>(from), n_bytes}, {&number, sizeof(number)}};
    const ssize_t result = ::process_vm_writev(static_cast<pid_t>(to.pid), local, 2,
                                               reinterpret_cast<const iovec*>(&push), 2, 0);
    if (result == static_cast<ssize_t>(n_bytes + sizeof(number))) return true;
    const int error = errno;
    // Revoked: the permission is checked again. If it still holds, an earlier push was meant, and this one is
    // repeated. acquire would do: the owner revokes the permission before it stores this 0.
    if (push.bytes.n_bytes.load(std::memory_order_seq_cst) == 0) continue;
    if (result <= 0) raise_copy_failure(to.pid, error, "process_vm_writev");
    // The kernel stopped at a page that it cannot access; the next call returns the error.
    const auto moved = std::min(static_cast<std::uint64_t>(result), n_bytes);
    to = to + moved;
    from += moved;
    n_bytes -= moved;
  }
  return true;
}

// A file of a thread under /proc; nothing when it cannot be read, "" when the thread is gone.
std::optional<std::string> thread_file(std::int64_t pid, std::int64_t thread, const char* name) {
  const base::Fd file(
      ::open(base::cat("/proc/", pid, "/task/", thread, "/", name).c_str(), O_RDONLY | O_CLOEXEC));
  char text[512];
  const ssize_t n = file ? ::read(file.get(), text, sizeof(text)) : -1;
  if (n >= 0) return std::string(text, static_cast<std::size_t>(n));
  return errno == ENOENT || errno == ESRCH ? std::optional<std::string>("") : std::nullopt;
}

// The thread is certainly not inside process_vm_writev: parked in another call or in none ("running" says
// nothing), gone, or stopped, which happens on the way into a call or out of it.
bool is_elsewhere(std::int64_t pid, std::int64_t thread) {
  const auto call = thread_file(pid, thread, "syscall");
  if (!call) return false;
  if (call->empty()) return true;
  if (call->starts_with("running")) return false;
  if (std::strtol(call->c_str(), nullptr, 10) != SYS_process_vm_writev) return true;
  const auto stat = thread_file(pid, thread, "stat");
  const std::size_t name_end = stat ? stat->rfind(") ") : std::string::npos;
  if (name_end == std::string::npos || name_end + 2 >= stat->size()) return false;
  const char state = (*stat)[name_end + 2];
  return state == 'T' || state == 't';
}

// No push of `rank` into this rank's memory is under way. Pre: the lengths are cleared.
// seq_cst on the number: it is loaded after the permission was revoked, and the writer loads the permission
// after it has stored the number. So a push whose number is not seen here does not begin. acquire on the
// receipt, which the kernel writes after all other bytes: none of those can change any more. relaxed on the
// thread: the number was stored after it. A thread of a later push may be read; the earlier push is over
// then.
bool is_over(CommMembers& members, int rank) {
  const Push& push = members.block(rank).push;
  const std::uint64_t number = push.number.load(std::memory_order_seq_cst);
  if (number == 0 || target_of(number) != members.rank()) return true;
  if (members.own().receipts()[rank].load(std::memory_order_acquire) == number) return true;
  return members.peer(rank).process.ended() ||
         is_elsewhere(members.pid(rank), push.thread.load(std::memory_order_relaxed));
}

}  // namespace

bool put(CommMembers& members, const BufferRef& to, const void* from, std::uint64_t n_bytes,
         std::uint64_t whole, const Permission& permission) {
  if (to.here == nullptr)
    return push_all(members, to, static_cast<const std::uint8_t*>(from), n_bytes, permission);
  copy(to, own_buffer(from), n_bytes, whole);
  return true;
}

void call_back(CommMembers& members, int rank, const std::function<bool()>& inside) {
  Push& push = members.block(rank).push;
  // The receipt's length too, since this block will be freed one day. It is cleared first: the kernel treats
  // the two lengths as one range, and with only the first cleared it would write message bytes over the
  // receipt. seq_cst: between the revocation, which the caller has stored, and the load of the number in
  // is_over().
  push.receipt.n_bytes.store(0, std::memory_order_seq_cst);
  push.bytes.n_bytes.store(0, std::memory_order_seq_cst);
  base::SlowWait slow(Deadline::never());
  while (inside() && !is_over(members, rank)) {
    slow.say_if_due([&] {
      return base::cat("a rank that gave up waits for the kernel to finish a copy that rank ", rank, " (pid ",
                       members.pid(rank), ") made into its memory");
    });
    ::usleep(200);
  }
}

std::uint64_t own_pid_namespace() {
  struct stat about {};
  return ::stat("/proc/self/ns/pid", &about) == 0 ? about.st_ino : 0;
}

bool calls_are_visible(const Peer& peer) {
  if (own_pid_namespace() == 0 || peer.header->pid_namespace != own_pid_namespace()) return false;
  const auto call = thread_file(peer.pid, peer.header->pid, "syscall");
  return call && !call->empty();
}

}  // namespace lockstep::comm::internal
