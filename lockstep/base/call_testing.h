// For tests: bounds for waits, and what a call raised.
#pragma once

#include <gtest/gtest.h>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep::call_testing {

// Long enough for a slow machine, short enough to end a broken run.
inline Deadline patience() {
  return Deadline::after(Milliseconds(60'000));
}

// For waits that a test wants to see expire.
inline Deadline soon() {
  return Deadline::after(Milliseconds(20));
}

// The kind of the lockstep::Error that `call` raises; a failed test when it raises none.
template <class Call>
ErrorKind kind_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "raised nothing";
  return ErrorKind::kInternal;
}

}  // namespace lockstep::call_testing
