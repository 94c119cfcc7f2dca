// What went wrong, as the ABI reports it, and the exception that carries it inside the plug-in. Nothing of it
// crosses the C table.
#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::gloo_plugin {

struct Failure {
  lockstep_status status = LOCKSTEP_INTERNAL;
  std::string message;
  int peer = -1;  // the lost rank, for LOCKSTEP_PEER_LOST
  std::int64_t pid = -1;
  std::string cause;
};

class Error : public std::exception {
 public:
  explicit Error(Failure failure) : failure_(std::move(failure)) {}
  const char* what() const noexcept override { return failure_.message.c_str(); }
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

// 0 for what is no number.
template <class Number>
Number number_in(std::string_view text) {
  Number number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

[[noreturn]] inline void raise(lockstep_status status, std::string message) {
  throw Error({.status = status, .message = std::move(message)});
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
