// Messages of a rank to itself: a send meets the oldest receive of its tag, or waits for one. The group of
// one uses it for all its messages. Handles have the engine ABI (test, wait, release, last_error), so a Work
// cannot tell them from an engine's. Thread safety: every method may be called from any thread.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/engine/engine.h"

namespace lockstep::internal {

class Loopback {
 public:
  Loopback();
  // Takes a SEND or RECV to oneself; its deadline is kept when it is tested or waited for.
  comm::OpHandle post(const lockstep_op& op);
  // Ends every message that has not met another.
  void abort(const std::string& reason);

  struct Box;  // outlived by handles

 private:
  const std::shared_ptr<Box> box_;
};

}  // namespace lockstep::internal
