// What went wrong, as the ABI tells it, and the exception that carries it inside the plug-in. Nothing of it crosses the
// C table.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>
#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::gloo_plugin {

struct Failure {
  lockstep_status status = LOCKSTEP_INTERNAL;
  std::string words;
  int peer = -1;  // the lost rank, for LOCKSTEP_PEER_LOST
  std::int64_t pid = -1;
  std::string cause;
};

class Error : public std::exception {
 public:
  explicit Error(Failure failure) : failure_(std::move(failure)) {}
  const char* what() const noexcept override { return failure_.words.c_str(); }
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

[[noreturn]] inline void raise(lockstep_status status, std::string words) {
  throw Error({.status = status, .words = std::move(words)});
}

// CLOCK_MONOTONIC, the clock of the ABI's deadlines.
inline std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}
inline std::int64_t after_ms(std::int64_t ms) {
  return now_ns() + ms * 1'000'000;
}

}  // namespace lockstep::gloo_plugin
