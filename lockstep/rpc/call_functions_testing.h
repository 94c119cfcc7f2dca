// For the tests of calls: functions that workers call on each other. A program registers each once, however
// many of its sources include this.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/rpc/function.h"

namespace lockstep::rpc::testing {

inline int add(int a, int b) {
  return a + b;
}
LOCKSTEP_RPC_FUNCTION(add);

inline std::atomic<int> n_pokes{0};
inline void poke() {
  ++n_pokes;
}
LOCKSTEP_RPC_FUNCTION(poke);

inline void fail(const std::string& text) {
  throw std::runtime_error(text);
}
LOCKSTEP_RPC_FUNCTION(fail);

inline void sleep_ms(int ms) {
  std::this_thread::sleep_for(Milliseconds(ms));
}
LOCKSTEP_RPC_FUNCTION(sleep_ms);

}  // namespace lockstep::rpc::testing
