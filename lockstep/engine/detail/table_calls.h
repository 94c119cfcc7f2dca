// How the C tables of engines inside this library turn exceptions into statuses. Plug-ins have plugin.h,
// which knows neither Failure nor the log.
// Thread safety: functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/engine/engine.h"
#include "lockstep/engine/plugin.h"

namespace lockstep::comm {

// The message goes to the caller's buffer.
inline lockstep_status fail(const Failure& failure, char* error, std::size_t capacity) {
  put(error, capacity, failure.message);
  return status_of(failure.kind);
}

// A peer from the numbers of a C table, where a negative number means unknown.
inline LostPeer lost_peer(std::int32_t rank, std::int64_t pid, std::string cause) {
  const auto known = [](auto number) { return number >= 0 ? std::optional(number) : std::nullopt; };
  return {.rank = known(rank), .pid = known(pid), .cause = std::move(cause)};
}

// The reverse, for comm_failure: writes the peer of `failure`, if there is one, through the caller's
// pointers.
inline void put_peer(const std::optional<Failure>& failure, std::int32_t* rank, std::int64_t* pid,
                     char* cause, std::size_t capacity) {
  const LostPeer peer = failure ? failure->peer.value_or(LostPeer{}) : LostPeer{};
  if (rank != nullptr) *rank = peer.rank.value_or(-1);
  if (pid != nullptr) *pid = peer.pid.value_or(-1);
  put(cause, capacity, peer.cause);
}

// Runs `call`, which returns a status. What it throws becomes one, with its message in `error`.
template <class Call>
lockstep_status reported(char* error, std::size_t capacity, const Call& call) {
  return guarded(call, [&] { return fail(base::current_failure(), error, capacity); });
}

// The same with a log line, for entries that have no buffer for a message.
template <class Call>
lockstep_status logged(const Call& call) {
  return guarded(call, [] {
    const Failure failure = base::current_failure();
    base::log(LogLevel::kError, failure.message);
    return status_of(failure.kind);
  });
}

}  // namespace lockstep::comm
