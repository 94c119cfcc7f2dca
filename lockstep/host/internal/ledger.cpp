#include "lockstep/host/internal/ledger.h"
#include "lockstep/local/wake.h"

#include <sched.h>

#include <cstring>

#include "lockstep/engine/engine.h"

namespace lockstep::comm::internal {
namespace {

template <std::size_t N>
void put(char (&to)[N], const std::string& text) {
  const std::size_t n = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

}  // namespace

void write_ledger(Ledger& ledger, const Failure& failure, int by_rank) {
  std::uint32_t empty = Ledger::kEmpty;
  if (!ledger.state.compare_exchange_strong(empty, Ledger::kWriting)) return;
  ledger.status = status_of(failure.kind);
  ledger.by_rank = by_rank;
  ledger.peer_rank = failure.peer ? failure.peer->rank : -1;
  ledger.peer_pid = failure.peer ? failure.peer->pid : -1;
  put(ledger.message, failure.message);
  put(ledger.cause, failure.peer ? failure.peer->cause : "");
  ledger.state.store(Ledger::kWritten, std::memory_order_release);
}

Failure read_ledger(Ledger& ledger) {
  Failure failure{.kind = kind_of(static_cast<lockstep_status>(ledger.status)),
                  .message = std::string(ledger.message, ::strnlen(ledger.message, sizeof(ledger.message))),
                  .family = ErrorFamily::kBackend};
  if (ledger.peer_rank >= 0) {
    failure.peer = LostPeer{ledger.peer_rank, ledger.peer_pid,
                            std::string(ledger.cause, ::strnlen(ledger.cause, sizeof(ledger.cause)))};
  }
  return failure;
}

void break_group(Circle& circle, const Failure& failure) {
  write_ledger(circle.board(0).ledger, failure, circle.rank());
  for (int r = 0; r < circle.size(); ++r) {
    circle.board(r).broken.store(1, std::memory_order_seq_cst);
    local::wake(circle.doorbell(r));
  }
}

std::optional<Failure> first_failure(Circle& circle) {
  Ledger& ledger = circle.board(0).ledger;
  if (circle.own().broken.load(std::memory_order_acquire) == 0 &&
      ledger.state.load(std::memory_order_acquire) == Ledger::kEmpty) {
    return std::nullopt;
  }
  // Whoever claimed the ledger needs microseconds to fill it, unless it was killed in between.
  const Deadline patience = Deadline::after(Milliseconds(50));
  while (ledger.state.load(std::memory_order_acquire) != Ledger::kWritten) {
    if (patience.expired()) {
      return Failure{.kind = ErrorKind::kPeerLost,
                     .message = "the group broke and the rank that knew why is gone",
                     .family = ErrorFamily::kBackend,
                     .peer = LostPeer{}};
    }
    ::sched_yield();
  }
  return read_ledger(ledger);
}

}  // namespace lockstep::comm::internal
