// For the tests of TcpStore as its users see it: a server of its own for each test, and what a call raised.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::tcp_testing {

inline const std::string kHost = "127.0.0.1";
inline constexpr Milliseconds kPatience{60'000};
inline constexpr Milliseconds kShort{60};

inline TcpStoreOptions master(TcpStoreOptions options = {}) {
  options.port = 0;
  options.is_master = true;
  return options;
}

template <class Class>
Failure failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Class& error) {
    return error.failure();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "raised another class: " << error.what();
    return {};
  }
  ADD_FAILURE() << "raised nothing";
  return {};
}

inline bool mentions(const Failure& failure, const std::string& text) {
  return failure.message.find(text) != std::string::npos;
}

}  // namespace lockstep::tcp_testing
