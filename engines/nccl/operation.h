// An operation that was posted: the call with all it points to copied, the events that order it on the device, and how it
// ends.
//
//   kQueued --lane issues it--> kIssued --its done event, or a stop--> kOver
//      '------------------------a stop---------------------------------^
//
// Shared by the caller's handle, the communicator's list of pending operations and the lane that runs it. Thread safety:
// what is constant from post on, any thread; the rest under `mutex`.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "engines/nccl/event_pool.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/engine/plugin.h"

namespace lockstep::nccl_plugin {

struct Operation {
  Operation(const lockstep_op& from, int size) : op(from), where(from.where != nullptr ? from.where : "") {
    op.where = where.c_str();
    const auto n = static_cast<std::size_t>(size);
    if (from.kind == LOCKSTEP_ALL_TO_ALL_V) send_counts.assign(from.send_counts, from.send_counts + n);
    if (comm::is_uneven(from.kind)) recv_counts.assign(from.recv_counts, from.recv_counts + n);
    op.send_counts = send_counts.data();
    op.recv_counts = recv_counts.data();
  }
  Operation(const Operation&) = delete;

  // ---- constant from post on, except for what its lane sets before it is issued
  lockstep_op op;
  const std::string where;
  std::vector<std::uint64_t> send_counts, recv_counts;
  std::uint64_t sequence =
      0;  // collectives: the how-manieth of the communicator; messages: of sender and receiver
  EventPool::Lent ready;               // recorded in op.stream by post; empty: nothing to wait for
  EventPool::Lent done;                // recorded when it is issued
  int peer = -1;                       // messages: the other rank, once it is known
  std::shared_ptr<Operation> partner;  // a message of a rank to itself: the send, in the receive

  // ---- of the communicator
  std::list<std::shared_ptr<Operation>>::iterator place;  // in its list of pending ones

  enum class Stage : std::uint8_t { kQueued, kIssued, kOver };
  base::Mutex mutex;
  base::ConditionVariable changed;  // stage
  Stage stage LOCKSTEP_GUARDED_BY(mutex) = Stage::kQueued;
  lockstep_status status LOCKSTEP_GUARDED_BY(mutex) = LOCKSTEP_PENDING;
  std::string error LOCKSTEP_GUARDED_BY(mutex);
};
using OperationPtr = std::shared_ptr<Operation>;

// "all_reduce(sum, f32, 8 elements) #3 at train.cpp:12".
std::string text_of(const Operation& operation);
// Of a message, also one that another rank has announced: "send(i32, 10 elements, tag 3)".
std::string text_of_message(bool is_send, int dtype, std::uint64_t count, int tag);

}  // namespace lockstep::nccl_plugin
