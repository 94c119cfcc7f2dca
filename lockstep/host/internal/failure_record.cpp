#include "lockstep/host/internal/failure_record.h"
#include "lockstep/local/wake.h"

#include <sched.h>

#include <cstring>
#include <string_view>

#include "lockstep/engine/detail/table_calls.h"
#include "lockstep/engine/engine.h"

namespace lockstep::comm::internal {
namespace {

template <std::size_t N>
void put(char (&to)[N], std::string_view text) {
  const std::size_t n = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

}  // namespace

// The winner of the compare-exchange is the only writer, ever. Losers return at once: their failure is a
// consequence, or came second.
void write_failure_record(FailureRecord& record, const Failure& failure, int by_rank) {
  std::uint32_t empty = FailureRecord::kEmpty;
  if (!record.state.compare_exchange_strong(empty, FailureRecord::kWriting)) return;
  record.status = status_of(failure.kind);
  record.by_rank = by_rank;
  // No copies: the failure may be that there is no memory.
  record.peer_rank = failure.peer ? failure.peer->rank.value_or(-1) : -1;
  record.peer_pid = failure.peer ? failure.peer->pid.value_or(-1) : -1;
  put(record.message, failure.message);
  put(record.cause, failure.peer ? std::string_view(failure.peer->cause) : std::string_view());
  record.state.store(FailureRecord::kWritten, std::memory_order_release);
}

Failure read_failure_record(FailureRecord& record) {
  Failure failure{.kind = kind_of(static_cast<lockstep_status>(record.status)),
                  .message = std::string(record.message, ::strnlen(record.message, sizeof(record.message))),
                  .family = ErrorFamily::kBackend};
  if (record.peer_rank >= 0) {
    failure.peer = lost_peer(record.peer_rank, record.peer_pid,
                             std::string(record.cause, ::strnlen(record.cause, sizeof(record.cause))));
  }
  return failure;
}

// The record comes first: a rank that finds `broken` set finds the record written, or about to be. seq_cst:
// `broken` is stored before the check for sleepers, and before the caller loads `inside` of any rank
// (Operation::Inside).
void break_group(CommMembers& members, const Failure& failure) {
  write_failure_record(members.block(0).record, failure, members.rank());
  for (int r = 0; r < members.size(); ++r) {
    members.block(r).broken.store(1, std::memory_order_seq_cst);
    local::wake(members.doorbell(r));
  }
}

std::optional<Failure> first_failure(CommMembers& members) {
  FailureRecord& record = members.block(0).record;
  if (members.own().broken.load(std::memory_order_acquire) == 0 &&
      record.state.load(std::memory_order_acquire) == FailureRecord::kEmpty) {
    return std::nullopt;
  }
  // The rank that claimed the record needs microseconds to fill it, unless it was killed in between.
  const Deadline patience = Deadline::after(Milliseconds(50));
  while (record.state.load(std::memory_order_acquire) != FailureRecord::kWritten) {
    if (patience.expired()) {
      return Failure{.kind = ErrorKind::kPeerLost,
                     .message = "the group broke, and the rank that recorded the cause is gone",
                     .family = ErrorFamily::kBackend,
                     .peer = LostPeer{}};
    }
    ::sched_yield();
  }
  return read_failure_record(record);
}

}  // namespace lockstep::comm::internal
