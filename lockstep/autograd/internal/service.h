// Distributed autograd's part of an agent: the contexts of this worker, the messages between workers, and
// what calls carry along.
//
// A SMART pass. The origin walks its graph from the roots; for every recv node it meets it asks the worker at
// the other end, in one message per worker, to plan the matching send nodes: that worker walks on from them,
// and answers with the recv nodes it met in turn. So the origin goes on, wave by wave, until nothing new is
// met; what leads back to itself it plans without a message. Then all know exactly which gradients will come,
// and the parts run: a recv node sends its gradients, the first of them to reach a worker starts its part
// there, on the thread that found the message. A worker whose part is complete notifies the origin. Failures
// are reported to the origin, which aborts the pass on every worker that takes part. A FAST pass leaves out
// the plan: every send node of the context is waited for, and the origin learns who takes part from the
// reports. Thread safety: every method may be called from any thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "lockstep/autograd/internal/context_state.h"
#include "lockstep/autograd/internal/pass.h"
#include "lockstep/rpc/detail/recent_ids.h"

namespace lockstep::autograd::internal {

class AutogradService final : public rpc::Service, public rpc::CallExtension {
 public:
  explicit AutogradService(rpc::Agent& agent);

  rpc::Agent& agent() const { return agent_; }
  WorkerId self() const { return agent_.self().id; }

  // Contexts.
  std::uint64_t open_context();
  // Here, and on every worker it reached. `told_by`: who need not be notified.
  void release(std::uint64_t context, std::optional<WorkerId> told_by = std::nullopt);
  // Null when it is not known here.
  std::shared_ptr<ContextState> find(std::uint64_t context) const;
  // Made when it is new here; null when it was released.
  std::shared_ptr<ContextState> find_or_make(std::uint64_t context);

  // Passes.
  void backward(std::uint64_t context, const std::vector<at::Tensor>& roots, const BackwardOptions& options);
  void send_gradients(const std::shared_ptr<Pass>& pass, const RecvNode& from,
                      const variable_list& gradients);

  // CallExtension.
  Bytes encode(std::uint64_t context, WorkerId to, const std::function<void()>& encode) override;
  void decode(std::uint64_t context, WorkerId from, rpc::Leg leg,
              std::span<const std::uint8_t> extension_bytes, const std::function<void()>& decode) override;
  // Service.
  void on_lost(WorkerId peer, const std::string& cause) override;
  void debug_info(std::map<std::string, std::string>& info) override;
  void on_joined(WorkerId peer) override;
  void on_close() override;

 private:
  // Messages about contexts and passes that have ended may still be on their way.
  static constexpr std::size_t kRecentIds = 8192;

  // At the origin: plans the whole pass. Returns the workers that take part.
  std::vector<WorkerId> plan(const std::shared_ptr<Pass>& pass, const edge_list& roots);
  // Asks all, waits for all, and returns what is to be asked next.
  PlanRequests ask(const std::shared_ptr<Pass>& pass, const PlanRequests& requests);
  // The pass that a message is about. Raises kAborted when it is over, kUsage when another one is under way.
  std::shared_ptr<Pass> enter(const PassHead& head);
  bool is_over(std::uint64_t pass) const;
  void run_part(const std::shared_ptr<Pass>& pass);
  // Somebody's failure, reported to the origin if this is another worker.
  void fail(const std::shared_ptr<Pass>& pass, NodeFailure failure);
  void leave(const std::shared_ptr<Pass>& pass);
  void tell_origin(const Pass& pass, const NodeFailure* failure);
  // Has it given up by all that this worker notified of it; calls back when they have.
  void abort_others(const Pass& pass, const std::function<void()>& done);

  void tell_release(std::uint64_t context, WorkerId worker);
  // Whom the context came from, or went to. Those tell each other of its release; when one is gone, the owner
  // must.
  void note_worker(ContextState& state, WorkerId worker);
  void tell_owner(std::uint64_t context);
  void serve_plan(rpc::Request request);
  void serve_gradients(rpc::Request request);
  void serve_done(rpc::Request request);
  void serve_abort(rpc::Request request);
  void serve_cleanup(rpc::Request request);
  void serve_held(rpc::Request request);
  // Fails the pass when one of them is gone: nobody else may notice.
  void check_present(const std::shared_ptr<Pass>& pass, const std::vector<WorkerId>& workers);
  std::string name_of(WorkerId worker) const;
  Milliseconds timeout_of(const Pass& pass) const;

  rpc::Agent& agent_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::unordered_map<std::uint64_t, std::shared_ptr<ContextState>> contexts_;
  rpc::internal::RecentIds released_{kRecentIds};
  std::set<WorkerId> lost_;  // contexts of theirs are not made again
  bool closed_ = false;
  rpc::internal::RecentIds over_{kRecentIds};  // passes
};

}  // namespace lockstep::autograd::internal
