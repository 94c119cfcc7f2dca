// What the collectives need of a group, whoever implements it: start an operation, hand out memory, close.
// Private to group/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/engine/engine.h"
#include "lockstep/group/internal/join.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace lockstep::internal {

// A collective as its caller described it. `op` lacks only the deadline and the caller's line.
struct Request {
  const char* name;  // "all_reduce"; static
  std::source_location where;
  std::optional<Milliseconds> timeout;  // unset: the group's
  lockstep_op op{};
};

// The tensors of an operation, kept alive until it is over.
struct Held {
  std::vector<at::Tensor> buffers;  // what the engine reads and writes
  std::vector<at::Tensor> results;  // what Work::result() gives
  // Temporaries to copy into the caller's tensors once, when the operation ended well: (to, from).
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;

  // Runs the copies, unseen by autograd.
  void copy_back();
};

class GroupBase : public ProcessGroup {
 public:
  // Runs the operation to its end on this thread and returns its number; raises its error.
  virtual std::uint64_t run(Request& request) = 0;
  // Starts it; the Work holds the tensors. Raises when the group is broken or closed.
  virtual Work post(Request& request, Held held) = 0;
  // Null in a world of one.
  virtual const comm::Engine* engine() const = 0;
  // Memory the engine reduces in place; null when the engine has none.
  virtual std::shared_ptr<void> allocate(std::size_t n_bytes) = 0;
  // Leaves, once: settles operations in flight, then tells the others. An empty cause is an orderly leave.
  virtual void close(const std::string& cause) = 0;
};

// `group`, or the default group when null; raises kUsage when there is none or it is not one of ours.
std::shared_ptr<GroupBase> resolve(const Group& group);

}  // namespace lockstep::internal
