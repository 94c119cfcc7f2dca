// Tensors that are sharded over a mesh. A DTensor is an ordinary at::Tensor of the global sizes: operators,
// autograd, torch::nn modules and torch::optim work on it as on any tensor, and run on each rank's piece,
// with collectives where the operator needs them (docs/tensor_parallel.md).
//
//   auto mesh = init_device_mesh("cpu", {2});
//   auto x = distribute_tensor(whole, mesh, {Shard(0)});      // every rank has its rows
//   auto y = (x.matmul(w) + 1).sum();                         // y is Partial(sum): nothing was sent yet
//   double value = full_tensor(y).item<double>();             // all_reduce
//
// All ranks of a mesh make the same calls in the same order. A DTensor has no memory of its own: data_ptr()
// and storage() raise, to_local() has the rank's piece. Plain tensors do not mix with DTensors, but for those
// of no dimensions and inside an ImplicitReplicationScope. Errors: kUsage, before anything is sent, for what
// is stated below; those of the collectives. Thread safety: as tensors; backward may run on any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/dtensor/placement.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

bool is_dtensor(const at::Tensor& tensor);
// kUsage for plain tensors, both.
DeviceMesh device_mesh(const at::Tensor& dtensor);
const Placements& placements(const at::Tensor& dtensor);

struct DistributeOptions {
  // The rank along each mesh dimension whose values are sent to the others: Shard scatters, Replicate
  // broadcasts. None: every rank cuts its piece out of its own tensor and nothing is sent.
  std::optional<int> src_data_rank = 0;
};
// A leaf that requires a gradient where `tensor` does. `placements`: one per mesh dimension; none given: all
// Replicate. Partial(op) cannot be distributed to. A DTensor is returned as it is when mesh and placements
// are its own, refused otherwise. What was sent is contiguous, otherwise strides are those of a copy.
at::Tensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements = {},
                             DistributeOptions options = {});

struct FromLocalOptions {
  // Compares types and sizes: all ranks raise alike, naming the rank. Replicas get the first rank's values.
  bool run_check = false;
  // Of the whole tensor; both or neither. Neither: pieces of one size, and the strides of the local tensor.
  std::optional<std::vector<std::int64_t>> shape{};
  std::optional<std::vector<std::int64_t>> stride{};
};
// The DTensor of which `local` is this rank's piece; shares its memory. Differentiable: the local gradient is
// the piece of the global one under the same placements, whole where they are Partial. `placements` none: all
// Replicate.
at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements = {},
                      FromLocalOptions options = {});

struct ToLocalOptions {
  // How the local gradients make up the global one; unset: as the placements, Replicate where they are
  // Partial.
  std::optional<Placements> grad_placements{};
};
// This rank's piece; shares its memory. Differentiable.
at::Tensor to_local(const at::Tensor& dtensor, ToLocalOptions options = {});

struct RedistributeOptions {
  // Return before the last collective is over; the first operator that uses the result waits for it.
  bool async_op = false;
  // Values are converted to forward_dtype before they are sent, and the result has that type. Gradients are
  // converted to backward_dtype before they are sent, and back to the tensor's type afterwards.
  std::optional<at::ScalarType> forward_dtype{};
  std::optional<at::ScalarType> backward_dtype{};
};
// The same values under other placements, by the cheapest sequence of collectives (redistribute_plan.h). To
// Partial is refused. Differentiable: the gradient is redistributed back, to Replicate where the tensor was
// Partial.
at::Tensor redistribute(const at::Tensor& dtensor, Placements placements, RedistributeOptions options = {});

// The whole, as a plain tensor, on every rank. Differentiable, as redistribute to Replicate and to_local.
at::Tensor full_tensor(const at::Tensor& dtensor);

// "DTensor Float [8, 6] on mesh cpu [2] (tp), [Shard(0)], local [4, 6]"; for plain tensors type and sizes.
std::string describe(const at::Tensor& tensor);

// While one lives, plain tensors beside DTensors count as replicas, on this thread. They must be equal on all
// ranks.
class ImplicitReplicationScope {
 public:
  ImplicitReplicationScope();
  ~ImplicitReplicationScope();
  ImplicitReplicationScope(const ImplicitReplicationScope&) = delete;
  ImplicitReplicationScope& operator=(const ImplicitReplicationScope&) = delete;

 private:
  const bool before_;
};

}  // namespace lockstep
