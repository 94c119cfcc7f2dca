#include "lockstep/ddp/internal/graph.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_set>
#include <utility>

namespace lockstep::internal {

// Depth first, each node once, without recursion: graphs are deep. Only marks: what was reached by an earlier
// output of the same step stays marked.
void mark_reached(std::span<const at::Tensor> outputs, std::span<const compat::NodePtr> entries,
                  std::span<const compat::NodePtr> accumulators, std::vector<unsigned char>& reached) {
  using torch::autograd::Node;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open;
  const auto add = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined()) add(torch::autograd::impl::gradient_edge(output).function.get());
  }
  for (const auto& entry : entries) add(entry.get());
  while (!open.empty()) {
    const Node* const node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) add(edge.function.get());
  }
  for (std::size_t i = 0; i < accumulators.size(); ++i) {
    if (seen.contains(accumulators[i].get())) reached[i] = 1;
  }
}

namespace {

// A pre-hook sees the gradients on their way in and returns them unchanged; it is there for its side effect.
class Reached final : public torch::autograd::FunctionPreHook {
 public:
  explicit Reached(std::function<void()> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    call_();
    return gradients;
  }

 private:
  const std::function<void()> call_;
};

// A node behind the outputs: its backward is the first thing that runs in a pass through them. Undefined
// gradients are not materialised: they stay what they are for the nodes behind.
class Sink : public torch::autograd::Function<Sink> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                at::ArrayRef<at::Tensor> outputs,
                                                const std::shared_ptr<std::function<void()>>& begins,
                                                bool clone) {
    context->set_materialize_grads(false);
    context->saved_data["begins"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(begins));
    torch::autograd::variable_list passed;
    for (const at::Tensor& output : outputs) passed.push_back(clone ? output.clone() : output);
    return passed;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*static_cast<Holder*>(context->saved_data["begins"].toCapsule().get())->begins)();
    gradients.emplace_back();  // for `begins`
    gradients.emplace_back();  // for `clone`
    return gradients;
  }

 private:
  struct Holder : torch::CustomClassHolder {
    explicit Holder(std::shared_ptr<std::function<void()>> call) : begins(std::move(call)) {}
    std::shared_ptr<std::function<void()>> begins;
  };
};

}  // namespace

void on_reached(std::span<const at::Tensor> outputs, const std::function<void()>& reached) {
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.grad_fn())
      output.grad_fn()->add_pre_hook(std::make_unique<Reached>(reached));
  }
}

std::vector<at::Tensor> pass_sink(const std::vector<at::Tensor>& outputs, std::function<void()> begins,
                                  bool clone) {
  std::vector<at::Tensor> with_graph;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) with_graph.push_back(output);
  }
  // Nothing will call backward through them.
  if (with_graph.empty()) return outputs;
  const auto passed = Sink::apply(at::ArrayRef<at::Tensor>(with_graph),
                                  std::make_shared<std::function<void()>>(std::move(begins)), clone);
  std::vector<at::Tensor> result = outputs;
  std::size_t next = 0;
  for (at::Tensor& output : result) {
    if (output.defined() && output.requires_grad()) output = passed[next++];
  }
  return result;
}

}  // namespace lockstep::internal
