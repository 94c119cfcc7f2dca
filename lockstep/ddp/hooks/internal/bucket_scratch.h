// Memory that a hook keeps for each bucket between steps, and the compressing wrapper built on it. Private to
// hooks/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/group/process_group.h"

namespace lockstep::internal {

// One 1-D tensor per bucket; uninitialised when new, otherwise as the last step left it. With a group it is
// in that group's shared memory. One thread; the last step's futures must be complete.
class BucketScratch {
 public:
  explicit BucketScratch(Group group) : group_(std::move(group)) {}
  // As long as `like`, and on its device.
  at::Tensor get(std::size_t bucket, const at::Tensor& like, at::ScalarType dtype);

 private:
  const Group group_;
  std::vector<at::Tensor> kept_;
};

// `group`: whose shared memory holds the cast buckets; null: private memory.
CommHook compress(CommHook hook, at::ScalarType dtype, const Group& group);

}  // namespace lockstep::internal
