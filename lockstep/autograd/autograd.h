// Backward passes that go through remote calls.
//
//   {
//     autograd::DistAutogradContext context;
//     at::Tensor hidden = rpc_sync("worker1", layer, {input});   // tensors keep their history across workers
//     autograd::backward(context.id(), {loss(hidden)});
//     at::Tensor gradient = autograd::get_gradients(context.id()).find(weight);
//   }                                                            // released here and on every worker it reached
//
// While a context is current, every call, its answer and to_here connect the tensors that require gradients on both sides.
// backward() then runs every worker's part of the graph, and adds the gradients of leaves up in the context, on the
// worker where the leaf is; Tensor::grad() is not touched. A function that runs for a caller has the caller's context.
// docs/autograd.md tells how, and what it costs.
// Thread safety: everything here may be called from any thread; a DistAutogradContext belongs to the one that made it. Contexts are
// independent of each other; one context has one backward pass at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/rref.h"
#include "lockstep/tensor/gradient_access.h"
#include "lockstep/tensor/tensor_object.h"

namespace lockstep::autograd {

// What this worker knows of a context: gradients of its leaves. As GradientAccess it stands in for Tensor::grad(); its
// entry nodes are those through which gradients of other workers come.
// Thread safety: any thread.
class Context : public GradientAccess {
 public:
  virtual std::uint64_t id() const = 0;
};

// A context of this thread while it lives. Raises kUsage inside another one, and before init_rpc. The end releases what all
// workers keep for it; it sends messages and does not wait for them.
class DistAutogradContext {
 public:
  DistAutogradContext();
  ~DistAutogradContext();
  DistAutogradContext(const DistAutogradContext&) = delete;
  DistAutogradContext& operator=(const DistAutogradContext&) = delete;

  // This worker's number in the high 16 bits, a counter below.
  std::uint64_t id() const { return id_; }

 private:
  const std::shared_ptr<rpc::Agent> agent_;
  std::uint64_t id_ = 0;
};

// auto scope = autograd::context();
[[nodiscard]] inline DistAutogradContext context() {
  return {};
}

// The current context's; raises kUsage when there is none.
std::uint64_t get_context_id();
// The current context as this worker knows it; null when there is none.
std::shared_ptr<Context> current_context();

// The gradients of one context on one worker, in the order they came. A value; the tensors are the context's own.
class Gradients {
 public:
  struct Entry {
    at::Tensor tensor;
    at::Tensor gradient;
  };
  // Undefined when it has none.
  at::Tensor find(const at::Tensor& tensor) const;
  bool contains(const at::Tensor& tensor) const { return find(tensor).defined(); }
  std::size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  void add(Entry entry);

 private:
  std::vector<Entry> entries_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> places_;
};

// Raises kUsage for a context that this worker does not know: it was released, or never came here.
Gradients get_gradients(std::uint64_t context);

enum class Mode : std::uint8_t {
  // Finds out across workers which calls the roots depend on before anything runs.
  kSmart,
  // Takes it that they depend on every call made in the context, which saves a round trip. If they do not, the pass never
  // finishes, and fails at its timeout.
  kFast,
};

struct BackwardOptions {
  bool retain_graph = false;  // false: a second pass through the same graph raises
  Mode mode = Mode::kSmart;
  Milliseconds timeout =
      rpc::kDefaultRpcTimeout;  // of the whole pass; negative: the agent's rpc_timeout; zero: none
};

// Blocks until every worker's part is over. Roots are scalars of this worker with a history.
// Raises kUsage for other roots, unknown contexts and a context whose pass is under way. What fails during the pass is raised as
// "Error on Node <worker>: ...", with the kind of the error there (RemoteError when it came from another worker): kPeerLost
// names the worker that is gone, kTimeout is the pass's. The pass is then given up everywhere, and the context can be used again;
// gradients that had been added up stay.
void backward(std::uint64_t context, const std::vector<at::Tensor>& roots,
              const BackwardOptions& options = {});

// From a value on another worker, or this one: runs there, as if it had called backward() itself, and blocks until it is over. What it
// raises there comes back as RemoteError.
template <std::same_as<at::Tensor> T>  // so that {loss} is never taken for an RRef
void backward(std::uint64_t context, const rpc::RRef<T>& root, const BackwardOptions& options = {});

// Adds distributed autograd to an agent: an entry of RpcOptions::extensions. lockstep::init_rpc gives it.
std::unique_ptr<rpc::Service> extension(rpc::Agent& agent);

namespace internal {
void backward_from_rref(std::uint64_t context, const rpc::RRef<at::Tensor>& root,
                        const BackwardOptions& options);
}  // namespace internal

template <std::same_as<at::Tensor> T>
void backward(std::uint64_t context, const rpc::RRef<T>& root, const BackwardOptions& options) {
  internal::backward_from_rref(context, root, options);
}

}  // namespace lockstep::autograd
