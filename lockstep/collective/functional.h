// Functional collectives: out of place, started immediately, waited for on first use; the names are those of
// torch.distributed._functional_collectives.
//
//   auto sum = functional::all_reduce(x);     // returns while the ranks still work
//   ...                                       // computation that overlaps
//   auto y = sum.wait() * 2;                  // waits here
//
// The result is a value class and not an at::Tensor, because a C++ tensor cannot wait by itself: it would
// need a dispatch key of its own that every operator of libtorch passes through, as Python's async tensor
// does, and every operator of every program would pay for it. An AsyncTensor converts to at::Tensor where one
// is expected.
//
// These are not recorded by autograd (inputs are read as they are), except those whose names end in
// _autograd; differentiable.h has more of them. Inputs are not modified, and must not be modified before the
// result is ready. Errors in arguments are raised at the call, those of the operation by wait(). Otherwise as
// collectives.h.
// Thread safety: the functions as collectives.h, AsyncTensor as stated at the class.
// On a process that is not a member of the group a call only logs a warning; results are undefined tensors
// that are ready immediately. The autograd variants raise kUsage instead, as differentiable.h does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <vector>

#include "lockstep/collective/collectives.h"
#include "lockstep/group/work.h"

namespace lockstep::functional {

// A tensor that is being computed. Copies share it. Thread safety: every method may be called from any
// thread.
class AsyncTensor {
 public:
  // Undefined, ready.
  AsyncTensor() = default;
  // `tensor` is ready when `work` has completed; `finish`, when given, then computes the result from it,
  // once.
  AsyncTensor(at::Tensor tensor, Work work, std::function<at::Tensor(const at::Tensor&)> finish = {});

  // Blocks until the tensor is ready; raises the operation's error.
  const at::Tensor& wait() const;
  operator at::Tensor() const { return wait(); }
  const at::Tensor* operator->() const { return &wait(); }
  // The methods below never block; they have the same meaning as for a Work.
  bool done() const;
  // The tensor. Raises kUsage before completion, the operation's error after a failure.
  const at::Tensor& result() const;
  // Null while running and after success.
  std::exception_ptr error() const;
  // Calls fn(this tensor) once it is done; where and how, as Work::on_done.
  void on_done(std::function<void(const AsyncTensor&)> fn) const;
  // The tensor in its current state, possibly not written yet. Never blocks.
  at::Tensor unfinished() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// The tail: a group (null: the default one), a timeout, the caller's line.
struct Options {
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
struct ReduceOptions {
  ReduceOp op{};
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};

AsyncTensor broadcast(const at::Tensor& self, int src, Options options = {});  // src: rank in the world
AsyncTensor all_reduce(const at::Tensor& self, ReduceOptions options = {});
// The inputs of all ranks concatenated on `gather_dim`.
AsyncTensor all_gather_tensor(const at::Tensor& self, std::int64_t gather_dim = 0, Options options = {});
// This rank's part of the reduction, split along `scatter_dim`, whose size must be divisible by the group's
// size.
AsyncTensor reduce_scatter_tensor(const at::Tensor& self, std::int64_t scatter_dim = 0,
                                  ReduceOptions options = {});
struct AllToAllSingleOptions {
  // Rows (dimension 0) from and to each rank; empty: equal parts.
  std::vector<std::int64_t> output_split_sizes{};
  std::vector<std::int64_t> input_split_sizes{};
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
AsyncTensor all_to_all_single(const at::Tensor& self, AllToAllSingleOptions options = {});

// The same for several tensors in one operation (coalescing.h): all results become ready together.
std::vector<AsyncTensor> all_reduce_coalesced(const std::vector<at::Tensor>& self,
                                              ReduceOptions options = {});
std::vector<AsyncTensor> all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& self,
                                                          Options options = {});
// One scatter dimension for each tensor.
std::vector<AsyncTensor> reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& self,
                                                         const std::vector<std::int64_t>& scatter_dim,
                                                         ReduceOptions options = {});

// Recorded by autograd; returns after waiting for the result. Backward: the pairs of differentiable.h.
at::Tensor all_gather_tensor_autograd(const at::Tensor& self, std::int64_t gather_dim = 0,
                                      Options options = {});
at::Tensor reduce_scatter_tensor_autograd(const at::Tensor& self, std::int64_t scatter_dim = 0,
                                          ReduceOptions options = {});
at::Tensor all_to_all_single_autograd(const at::Tensor& self, AllToAllSingleOptions options = {});

}  // namespace lockstep::functional
