#include "lockstep/tensor/detail/saved_tensor_scope.h"

#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "lockstep/tensor/torch_compat.h"

namespace lockstep::internal {
namespace {

using torch::autograd::Engine;

thread_local SavedTensorScope* innermost = nullptr;

}  // namespace

class FrontEngine final : public compat::EngineInFront<Engine> {
 public:
  // Another engine can have been put in front of ours since: when Python's is loaded late.
  static void install() {
    FrontEngine& front = instance();
    if (&Engine::get_default_engine() == &front) return;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    Engine& current = Engine::get_default_engine();
    if (&current == &front) return;
    front.behind_.store(&current);
    torch::autograd::set_default_engine_stub([]() -> Engine& { return instance(); });
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return behind().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, compat::NodePtr root,
      torch::autograd::InputBuffer&& buffer) override {
    return behind().execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return behind().make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost != nullptr ? innermost->make_() : behind().get_default_saved_variable_hooks();
  }
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task,
                           const compat::NodePtr& node, std::exception& error) override {
    behind().thread_on_exception(task, node, error);
  }
  void thread_init(int device, const std::shared_ptr<torch::autograd::ReadyQueue>& queue,
                   bool should_increment) override {
    behind().thread_init(device, queue, should_increment);
  }

 private:
  FrontEngine() = default;
  // Never destroyed: libtorch may ask for its engine until the process has ended.
  static FrontEngine& instance() {
    static FrontEngine* const front = new FrontEngine();
    return *front;
  }
  Engine& behind() const override { return *behind_.load(); }

  std::atomic<Engine*> behind_{nullptr};
};

SavedTensorScope::SavedTensorScope(Make make) : make_(std::move(make)), outer_(innermost) {
  FrontEngine::install();
  innermost = this;
}

SavedTensorScope::~SavedTensorScope() {
  innermost = outer_;
}

}  // namespace lockstep::internal
