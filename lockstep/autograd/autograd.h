// Backward passes that go through remote calls.
//
//   {
//     autograd::DistAutogradContext context;
//     at::Tensor hidden = rpc_sync("worker1", layer, {input});   // tensors keep their history
//     autograd::backward(context, {loss(hidden)});
//     at::Tensor gradient = context.gradients().find(weight);
//   }  // released here and on every worker it reached
//
// While a context is current, every call, its answer and to_here connect the tensors that require gradients
// on both sides. backward() then runs every worker's part of the graph, and accumulates the gradients of
// leaves in the context, on the worker that has the leaf; Tensor::grad() is not touched. A function that runs
// for a caller has the caller's context. docs/autograd.md describes how, and what it costs.
// Thread safety: everything here may be called from any thread; a DistAutogradContext belongs to the thread
// that created it. Contexts are independent of each other; one context has one backward pass at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/rref.h"
#include "lockstep/tensor/gradient_access.h"
#include "lockstep/tensor/tensor_object.h"

namespace lockstep::autograd {

// The gradients of one context on one worker, in the order they were added. A value; the tensors are the
// context's own.
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

// A handle on a context. A value, which does not keep the context alive; as an argument of a call it means
// the same context on the other worker.
// Thread safety: every method may be called from any thread.
class Context {
 public:
  // Refers to no context.
  Context() = default;
  // As id() of another handle gave it.
  explicit Context(std::uint64_t id) : id_(id) {}

  // The worker that opened it in the high 16 bits, a counter below. For logs; 0 of none.
  std::uint64_t id() const { return id_; }
  // The gradients on this worker. Raises kUsage for a context unknown to this worker: it was released, or
  // never reached it.
  Gradients gradients() const;
  friend bool operator==(const Context&, const Context&) = default;

 private:
  std::uint64_t id_ = 0;
};

// A context of this thread while it lives. Raises kUsage inside another one, and before init_rpc. The
// destructor releases what all workers keep for it; it sends messages and does not wait for them.
class DistAutogradContext : public Context {
 public:
  DistAutogradContext();
  ~DistAutogradContext();
  DistAutogradContext(const DistAutogradContext&) = delete;
  DistAutogradContext& operator=(const DistAutogradContext&) = delete;

 private:
  explicit DistAutogradContext(std::shared_ptr<rpc::Agent> agent);
  const std::shared_ptr<rpc::Agent> agent_;
};

// auto scope = autograd::context();
[[nodiscard]] inline DistAutogradContext context() {
  return {};
}

// The context of this thread: its own, or that of the caller whose function it runs. Its gradients stand in
// for Tensor::grad(): lockstep::current_gradients() (tensor/gradient_access.h) reads and writes them one by
// one.
std::optional<Context> current_context();

enum class Mode : std::uint8_t {
  // Determines across workers which calls the roots depend on before anything runs.
  kSmart,
  // Assumes that they depend on every call made in the context, which saves a round trip. If they do not, the
  // pass never finishes, and fails at its timeout.
  kFast,
};

struct BackwardOptions {
  bool retain_graph = false;  // false: a second pass through the same graph raises
  Mode mode = Mode::kSmart;
  std::optional<Milliseconds>
      timeout{};  // of the whole pass; unset: the agent's rpc_timeout; kNoTimeout: none
};

// Blocks until every worker's part has completed. Roots are scalars of this worker with a history.
// Raises kUsage for other roots, unknown contexts and a context whose pass is under way. What fails during
// the pass is raised as "Error on Node <worker>: ...", with the kind of the error there (RemoteError when it
// came from another worker): kPeerLost names the worker that is gone, kTimeout is the pass's. The pass is
// then aborted on all workers, and the context can be used again; gradients accumulated so far are kept.
void backward(const Context& context, const std::vector<at::Tensor>& roots,
              const BackwardOptions& options = {});

// From a value on another worker, or this one: runs there, as if it had called backward() itself, and blocks
// until it has completed. What it raises there is raised here as RemoteError.
template <std::same_as<at::Tensor> T>  // so that {loss} is never taken for an RRef
void backward(const Context& context, const rpc::RRef<T>& root, const BackwardOptions& options = {});

// Adds distributed autograd to an agent: an entry of RpcOptions::extensions. lockstep::init_rpc adds it.
std::unique_ptr<rpc::Service> extension(rpc::Agent& agent);

namespace internal {
void backward_from_rref(const Context& context, const rpc::RRef<at::Tensor>& root,
                        const BackwardOptions& options);
}  // namespace internal

template <std::same_as<at::Tensor> T>
void backward(const Context& context, const rpc::RRef<T>& root, const BackwardOptions& options) {
  internal::backward_from_rref(context, root, options);
}

}  // namespace lockstep::autograd

namespace lockstep::object {

// Sent as its id.
template <>
struct Codec<autograd::Context> {
  static std::string name() { return Codec<std::uint64_t>::name(); }
  static void write(Encoder& encoder, const autograd::Context& context) {
    object::write(encoder, context.id());
  }
  static void read(Decoder& decoder, autograd::Context& out) {
    out = autograd::Context(object::read<std::uint64_t>(decoder));
  }
};

}  // namespace lockstep::object
