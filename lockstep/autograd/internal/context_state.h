// What one worker keeps for one context: gradients of its leaves, the send nodes of what it sent, the workers
// it exchanged messages with, and the backward pass under way.
// Thread safety: every method may be called from any thread. Ownership: shared by the service, a pass and
// whoever asked for it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "lockstep/autograd/autograd.h"
#include "lockstep/autograd/internal/nodes.h"

namespace lockstep::autograd::internal {

class Pass;

class ContextState final : public GradientAccess {
 public:
  explicit ContextState(std::uint64_t id) : id_(id) {}

  std::uint64_t id() const { return id_; }
  std::vector<compat::NodePtr> entry_nodes() const override;
  at::Tensor get(const at::Tensor& parameter) const override;
  void set(const at::Tensor& parameter, at::Tensor gradient) override;
  // Adds it up as AccumulateGrad does, which may take over `gradient`'s memory.
  void accumulate(const at::Tensor& variable, const at::Tensor& gradient);
  Gradients gradients() const;
  // Gradients of devices are complete after these: whoever reads them is ordered after. Null is ignored.
  void add_events(std::shared_ptr<object::DeviceEvents> events);

  void add_send(compat::NodeOwner<SendNode> node);
  // Raises kUsage when there is none, or it was used up.
  compat::NodeOwner<SendNode> find_send(std::uint64_t message) const;
  // Those that a pass may still go through.
  std::vector<compat::NodeOwner<SendNode>> open_sends() const;

  // False when it was noted before.
  bool note_worker(WorkerId worker);
  bool has_worker(WorkerId worker) const;
  std::vector<WorkerId> workers() const;

  // Null when none is under way.
  std::shared_ptr<Pass> pass() const;
  // The pass of this id, made if need be. Raises kUsage while another one is under way.
  std::shared_ptr<Pass> enter(std::uint64_t pass, const std::function<std::shared_ptr<Pass>()>& make);
  void leave(const Pass& pass);

 private:
  // For a thread that reads gradients. Pre: mutex_ is held.
  void order_reader() const;

  const std::uint64_t id_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Gradients gradients_;
  std::vector<std::shared_ptr<object::DeviceEvents>> events_;   // of the passes that ran here
  std::map<std::uint64_t, compat::NodeOwner<SendNode>> sends_;  // by message
  std::set<WorkerId> workers_;
  std::shared_ptr<Pass> pass_;
};

}  // namespace lockstep::autograd::internal
