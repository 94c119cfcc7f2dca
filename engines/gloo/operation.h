// An operation that was posted, or is run: the call with all it points to copied, and how it ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engines/gloo/describe.h"
#include "engines/gloo/failure.h"
#include "engines/gloo/transfer.h"
#include "engines/gloo/watch.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::gloo_plugin {

struct Operation {
  Operation(const lockstep_op& from, int size) : op(from), where(from.where != nullptr ? from.where : "") {
    op.where = where.c_str();
    const auto n = static_cast<std::size_t>(size);
    if (from.kind == LOCKSTEP_ALL_TO_ALL_V) send_counts.assign(from.send_counts, from.send_counts + n);
    if (from.kind == LOCKSTEP_ALL_TO_ALL_V || from.kind == LOCKSTEP_ALL_GATHER_V) {
      recv_counts.assign(from.recv_counts, from.recv_counts + n);
    }
    op.send_counts = send_counts.data();
    op.recv_counts = recv_counts.data();
  }
  Operation(const Operation&) = delete;

  lockstep_op op;
  const std::string where;
  std::vector<std::uint64_t> send_counts, recv_counts;
  CallHeader call;  // set before `begun`; whoever sees a deadline pass reads it
  std::atomic<bool> begun{false};
  // The rank it is blocked on, for the message when a deadline passes; -1: none, or any.
  std::atomic<int> waits_for{-1};
  // Owned by the communicator.
  Watch::Id alarm = 0;
  // SEND and RECV: what is under way. `message` is a CallHeader and a small payload.
  std::vector<char> message;
  std::unique_ptr<Transfer> head, body;

  base::Mutex mutex;
  base::ConditionVariable over;
  lockstep_status status LOCKSTEP_GUARDED_BY(mutex) = LOCKSTEP_PENDING;
  std::string error LOCKSTEP_GUARDED_BY(mutex);
};

}  // namespace lockstep::gloo_plugin
