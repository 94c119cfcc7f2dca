// The debug wrapper around a group, and monitored_barrier: both gather over the group's store.
#include <algorithm>
#include <functional>
#include <sstream>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/stack_trace.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/log.h"
#include "lockstep/debug/detail/checker.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/internal/backend_parts.h"
#include "lockstep/group/monitored_barrier.h"
#include "lockstep/store/prefix_store.h"

namespace lockstep::internal {
namespace {

std::string called(const char* name, const std::string& group, int rank, int size,
                   const std::source_location& where) {
  char text[kWhereCapacity];
  write_where(where, text);
  return base::cat(name, " of group \"", group, "\" (rank ", rank, " of ", size, ", called at ", text, ")");
}

template <class Part>
std::string of_each(const std::vector<at::Tensor>& tensors, const Part& part) {
  std::ostringstream out;
  for (const auto& tensor : tensors) out << (&tensor == tensors.data() ? "" : ", ") << part(tensor);
  return out.str();
}

// `number`: what the operation will be called; refused ones count, so that ranks one of which refused a call
// alone are found out here already.
Fingerprint fingerprint_of(const OperationRequest& request, std::uint64_t number) {
  const auto& tensors = request.described;
  Fingerprint print{.operation = request.name, .sequence = std::to_string(number)};
  print.n_tensors = std::to_string(tensors.size());
  print.dtypes = of_each(tensors, [](const at::Tensor& t) { return t.dtype().name(); });
  print.devices =
      of_each(tensors, [](const at::Tensor& t) { return c10::DeviceTypeName(t.device().type(), true); });
  if (!request.shapes_may_differ)
    print.shapes = of_each(tensors, [](const at::Tensor& t) { return t.sizes(); });
  return print;
}

// Raises what broke the group when a rank is lost or it was aborted: whoever is waited for will not come.
// Holds the communicator, which must outlive the gather that calls this.
std::function<void()> still_worth_it(const GroupBase& group) {
  const auto* engine = group.engine();
  auto communicator = engine == nullptr ? nullptr : group.communicator(*engine);
  if (!communicator) return {};
  return [communicator = std::move(communicator)] {
    const auto failure = communicator->broken();
    if (failure && (failure->kind == ErrorKind::kPeerLost || failure->kind == ErrorKind::kAborted))
      base::raise(*failure);
  };
}

// Every collective is preceded by a gather over the store, which is slow and meant for debugging (DETAIL).
// Messages are not compared: only two ranks take part in one.
class CheckedGroup final : public GroupBase {
 public:
  CheckedGroup(GroupIdentity identity, std::shared_ptr<GroupBase> inner, std::shared_ptr<Checker> checker)
      : GroupBase(std::move(identity)), inner_(std::move(inner)), checker_(std::move(checker)) {}

  std::string backend() const override { return inner_->backend(); }
  void abort(const std::string& reason) override { inner_->abort(reason); }
  bool checks_calls() const override { return true; }

  std::uint64_t run(OperationRequest& request) override {
    check(request);
    return inner_->run(request);
  }
  Work post(OperationRequest& request, HeldTensors held) override {
    check(request);
    return inner_->post(request, std::move(held));
  }
  const comm::Engine* engine() const override { return inner_->engine(); }
  std::shared_ptr<comm::Communicator> communicator(const comm::Engine& engine) const override {
    return inner_->communicator(engine);
  }
  std::shared_ptr<void> allocate(std::size_t n_bytes, c10::Device device) override {
    return inner_->allocate(n_bytes, device);
  }
  void close(const std::string& cause) override { inner_->close(cause); }

 private:
  // Leaves the operation what is left of the time of the whole call.
  void check(OperationRequest& request) {
    const auto kind = request.op.kind;
    if (kind == LOCKSTEP_SEND || kind == LOCKSTEP_RECV) return;
    request.deadline = deadline_of(request, *this);
    checker_->check(called(request.name, name(), rank(), size(), request.where),
                    fingerprint_of(request, sequence_number() + 1), base::time_left(*request.deadline),
                    still_worth_it(*inner_));
  }

  const std::shared_ptr<GroupBase> inner_;
  const std::shared_ptr<Checker> checker_;
};

}  // namespace

Group make_checked_group(GroupIdentity identity, const Group& inner, std::shared_ptr<Checker> checker) {
  return std::make_shared<CheckedGroup>(std::move(identity), resolve(inner), std::move(checker));
}

}  // namespace lockstep::internal

namespace lockstep {

void monitored_barrier(MonitoredBarrierOptions options) {
  const auto group = internal::resolve(options.group);
  const auto who =
      internal::called("monitored_barrier", group->name(), group->rank(), group->size(), options.where);
  if (options.timeout && *options.timeout < Milliseconds::zero()) {
    base::raise(ErrorKind::kUsage,
                base::cat(who, ": timeout is ", options.timeout->count(), " ms; it must not be negative"));
  }
  if (!group->is_member()) {
    base::log(LogLevel::kWarn, base::cat(who, ": this rank is not a member of the group; nothing was done"));
    return;
  }
  const auto* engine = group->engine();
  if (engine != nullptr && !group->communicator(*engine)) {
    base::raise(ErrorKind::kUsage, base::cat(who, ": the group was destroyed"));
  }
  if (group->size() == 1 || (engine != nullptr && internal::has_no_peers(*engine))) return;
  const auto timeout = options.timeout.value_or(group->timeout());
  PrefixStore store("monitored_barrier", group->store());
  internal::StoreGather gather(store, group->rank(), group->ranks());
  try {
    gather.gather(group->next_gather(), "",
                  {.timeout = timeout,
                   .patience = std::max(base::twice(timeout), group->timeout()),
                   .name_all = options.wait_all_ranks,
                   .who = who,
                   .still_worth_it = internal::still_worth_it(*group),
                   .one_look = timeout == Milliseconds::zero()},
                  [](const auto&) { return std::string(); });
  } catch (const Error& error) {
    Failure failure = error.failure();
    failure.message += base::stack_trace_if_asked();
    base::raise(std::move(failure));
  }
}

}  // namespace lockstep
