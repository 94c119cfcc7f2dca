// The workers of an RPC group, each with a name and a number.
// Thread safety: value types; const methods may be called concurrently.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "lockstep/transport/message.h"

namespace lockstep::rpc {

using transport::WorkerId;

struct WorkerInfo {
  WorkerId id = 0;
  std::string name{};

  // "WorkerInfo(id=1, name=worker1)".
  std::string text() const { return "WorkerInfo(id=" + std::to_string(id) + ", name=" + name + ")"; }
  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
};

// The target of a call, as it is convenient to write: a name, a number (its rank), or what get_worker_info
// returned.
class Worker {
 public:
  Worker(const char* name) : target_(std::string(name)) {}
  Worker(std::string name) : target_(std::move(name)) {}
  Worker(int id) : target_(id) {}
  Worker(const WorkerInfo& info) : target_(int{info.id}) {}

  const std::variant<std::string, int>& target() const { return target_; }

 private:
  std::variant<std::string, int> target_;
};

}  // namespace lockstep::rpc
