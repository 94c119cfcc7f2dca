#include "lockstep/optim/detail/zero_core.h"

#include <set>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/collective/objects.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"
#include "lockstep/optim/detail/sharded_over.h"
#include "lockstep/optim/internal/lend.h"
#include "lockstep/optim/internal/parameter_buckets.h"
#include "lockstep/optim/partition.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep {
namespace {

using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;
constexpr auto kShare = internal::Lend::What::kShare;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  base::raise(ErrorKind::kUsage, base::cat("ZeroRedundancyOptimizer: ", parts...));
}

Group group_of(const ZeroOptions& options) {
  const Group group = options.group ? options.group : default_group();
  if (!is_group_member(group)) refuse("this rank is not a member of group");
  return group;
}

// Partition, broadcast and buckets rely on it.
void check_parameter(const at::Tensor& parameter, const at::Tensor& first, std::size_t g, std::size_t i) {
  const std::string which = base::cat("parameter ", i, " of group ", g, " ");
  if (!parameter.defined()) refuse(which, "is an undefined tensor");
  if (!parameter.is_leaf()) refuse(which, "is not a leaf: it was computed, and cannot be optimized");
  if (parameter.layout() != at::kStrided) {
    refuse(which, "is a ", parameter.layout(), " tensor; all must be of one dense type");
  }
  if (parameter.scalar_type() != first.scalar_type() || parameter.device().type() != first.device().type()) {
    refuse(which, "is ", parameter.scalar_type(), " on ", parameter.device().type(), ", the first ",
           first.scalar_type(), " on ", first.device().type(),
           "; all must be of one dense type: use one optimizer per type");
  }
}

const Groups& checked(const Groups& groups) {
  const at::Tensor* first = nullptr;
  std::set<const void*> seen;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (first == nullptr) first = &parameters[i];
      check_parameter(parameters[i], *first, g, i);
      if (!seen.insert(parameters[i].unsafeGetTensorImpl()).second)
        refuse("parameter ", i, " of group ", g, " was given before");
    }
  }
  if (first == nullptr) refuse("there are no parameters");
  return groups;
}

// Frozen parameters may still have a gradient, which the optimizer would use: out of its sight for a while.
class HideGradients {
 public:
  explicit HideGradients(const Groups& groups) {
    for (const auto& group : groups) {
      for (const auto& parameter : group.params()) {
        if (!parameter.requires_grad() && parameter.grad().defined())
          hidden_.emplace_back(parameter, std::exchange(parameter.mutable_grad(), at::Tensor()));
      }
    }
  }
  ~HideGradients() {
    for (auto& [parameter, gradient] : hidden_) parameter.mutable_grad() = std::move(gradient);
  }
  HideGradients(const HideGradients&) = delete;
  HideGradients& operator=(const HideGradients&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> hidden_;
};

void move_tensors(StateValues& values, c10::Device device) {
  for (auto& [key, value] : values) {
    auto* tensor = std::get_if<at::Tensor>(&value);
    if (tensor != nullptr && (tensor->dim() > 0 || device.is_cpu())) *tensor = tensor->to(device);
  }
}

}  // namespace

ZeroCore::ZeroCore(const Groups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                   MakeOptimizer make, ZeroOptions options)
    : Optimizer(checked(groups), std::move(defaults)),
      options_(std::move(options)),
      group_(group_of(options_)),
      make_(std::move(make)) {
  partition();
}

ZeroCore::~ZeroCore() = default;

// ---- shares ----

Groups ZeroCore::own_groups() const {
  Groups own;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    std::vector<at::Tensor> mine;
    for (std::size_t i = 0; i < owners_[g].size(); ++i) {
      if (owners_[g][i] == group_->rank()) mine.push_back(param_groups_[g].params()[i]);
    }
    own.emplace_back(std::move(mine), param_groups_[g].options().clone());
  }
  return own;
}

std::vector<std::vector<at::Tensor>> ZeroCore::parameters_by_owner() const {
  std::vector<std::vector<at::Tensor>> owned(static_cast<std::size_t>(group_->size()));
  for (std::size_t g = 0; g < owners_.size(); ++g) {
    for (std::size_t i = 0; i < owners_[g].size(); ++i)
      owned[static_cast<std::size_t>(owners_[g][i])].push_back(param_groups_[g].params()[i]);
  }
  return owned;
}

// A pure function of the sizes, computed on every rank alike: no communication, and all ranks know all
// owners.
void ZeroCore::partition() {
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    for (std::size_t i = 0; i < param_groups_[g].params().size(); ++i) {
      internal::refuse_own_mesh("ZeroRedundancyOptimizer", base::cat(i, " of group ", g),
                                param_groups_[g].params()[i], group_);
    }
  }
  std::vector<std::vector<std::int64_t>> numels;
  partitioned_.clear();
  for (const auto& group : param_groups_) {
    auto& of_group = numels.emplace_back();
    for (const auto& parameter : group.params()) of_group.push_back(internal::local_shard(parameter).numel());
    partitioned_.push_back(group.params());
  }
  // Of a sharded parameter the sizes of this rank's piece. The ranks of this group hold the same piece, each of
  // its own mesh (refuse_own_mesh): with different sizes they would compute different owners.
  owners_ = partition_parameters(numels, group_->size());
  optim_ = make_(own_groups());
  add_initial_state();
  if (options_.parameters_as_bucket_view) {
    buckets_ = std::make_unique<internal::ParameterBuckets>(parameters_by_owner(), group_, buckets_.get(),
                                                            options_.where);
  }
}

// Some optimizers (Adagrad) give a parameter its first state when they are constructed.
void ZeroCore::add_initial_state() {
  for (auto& [parameter, state] : optim_->state()) {
    if (state_.count(parameter) == 0) state_[parameter] = std::move(state);
  }
  optim_->state().clear();
}

void ZeroCore::add_param_group(const OptimizerParamGroup& param_group) {
  if (options_.overlap_with_ddp) refuse("add_param_group: not with overlap_with_ddp");
  Groups all = param_groups_;
  all.push_back(param_group);
  checked(all);
  Optimizer::add_param_group(param_group);
  partition();
}

// Before a step: the caller may have added groups or frozen parameters.
void ZeroCore::adopt_changes() {
  for (std::size_t g = 0; g < partitioned_.size(); ++g) {
    const bool same = g < param_groups_.size() &&
                      std::equal(partitioned_[g].begin(), partitioned_[g].end(),
                                 param_groups_[g].params().begin(), param_groups_[g].params().end(),
                                 [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
    if (!same) refuse("the parameters of group ", g, " were exchanged; only add_param_group may change them");
  }
  if (options_.overlap_with_ddp &&
      (param_groups_.size() != partitioned_.size() || (buckets_ && !buckets_->hold()))) {
    refuse("groups, trainability and memory of parameters must not change with overlap_with_ddp");
  }
  if (param_groups_.size() != partitioned_.size()) {
    checked(param_groups_);
    partition();
  }
  if (buckets_ && !buckets_->hold()) {
    base::log(
        LogLevel::kWarn,
        "ZeroRedundancyOptimizer: parameters were frozen, thawed or given other memory; their buckets are "
        "built anew");
    buckets_ = std::make_unique<internal::ParameterBuckets>(parameters_by_owner(), group_, buckets_.get(),
                                                            options_.where);
  }
}

// ---- the step ----

at::Tensor ZeroCore::step(LossClosure closure) {
  if (options_.overlap_with_ddp) {
    base::log(LogLevel::kWarn,
              "ZeroRedundancyOptimizer: step() does nothing with overlap_with_ddp; backward() steps");
    return closure ? closure() : at::Tensor();
  }
  begin_iteration();
  return step_together(std::move(closure));
}

bool ZeroCore::shadow_iteration() {
  if (!options_.overlap_with_ddp) step_together(nullptr);  // otherwise the model's shadowed backward() steps
  return true;
}

at::Tensor ZeroCore::step_together(LossClosure closure) {
  // The order matters: owners first, since a group that was added has none; the whole state is outdated before
  // anything can fail; parameters are sent after the closure and the step.
  adopt_changes();
  consolidated_.reset();
  at::Tensor loss = local_step(std::move(closure));
  sync_parameters();
  return loss;
}

// State and options live in this object, keyed by parameter; the inner optimizer borrows those of its share
// for one step (Lend), so that users see one optimizer with one set of options.
at::Tensor ZeroCore::local_step(LossClosure closure) {
  const HideGradients hide(optim_->param_groups());
  internal::Lend lend(*this, *optim_, kShare);
  return optim_->step(lend.outside(std::move(closure)));
}

// All broadcasts are posted before the first is waited for; every rank posts them in the same order, by
// owner.
void ZeroCore::sync_parameters() {
  if (group_->size() == 1) return;
  const auto owned = parameters_by_owner();
  std::vector<Work> works;
  const auto send = [&](const at::Tensor& tensor, std::size_t owner) {
    works.push_back(broadcast(
        tensor,
        {.group_src = static_cast<int>(owner), .group = group_, .async_op = true, .where = options_.where}));
  };
  for (std::size_t r = 0; r < owned.size(); ++r) {
    if (buckets_) {
      if (buckets_->flat()[r].defined()) send(buckets_->flat()[r], r);
      continue;
    }
    for (const auto& parameter : owned[r]) {
      if (parameter.requires_grad()) send(internal::local_shard(parameter).detach(), r);
    }
  }
  for (const auto& work : works) work.wait();
  // The optimizer has bumped the versions of this rank's share; nobody has bumped the others'.
  for (std::size_t r = 0; r < owned.size(); ++r) {
    if (static_cast<int>(r) == group_->rank()) continue;
    for (const auto& parameter : owned[r]) {
      if (parameter.requires_grad()) parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
}

// ---- state ----

// Renumbered: parameter numbers are those over all groups.
OptimizerStateDict ZeroCore::own_state_dict() {
  OptimizerStateDict local;
  {
    const internal::Lend lend(*this, *optim_, kShare);
    local = get_optimizer_state_dict(*optim_);
  }
  OptimizerStateDict own;
  std::int64_t number = 0;
  std::int64_t local_number = 0;
  for (std::size_t g = 0; g < owners_.size(); ++g) {
    auto& group = own.param_groups.emplace_back();
    group.options = std::move(local.param_groups[g].options);
    for (const int owner : owners_[g]) {
      group.params.push_back(number);
      if (owner == group_->rank()) {
        if (const auto state = local.state.find(local_number++); state != local.state.end()) {
          move_tensors(state->second, c10::kCPU);
          own.state.emplace(number, std::move(state->second));
        }
      }
      ++number;
    }
  }
  return own;
}

void ZeroCore::consolidate_state_dict(int to) {
  if (to < 0 || to >= group_->size()) {
    refuse("consolidate_state_dict: ", to, " is not a rank of the group, which has ", group_->size());
  }
  adopt_changes();
  consolidated_.reset();
  OptimizerStateDict whole = own_state_dict();
  const bool mine = to == group_->rank();
  // Collective: ranks that keep nothing still send.
  auto shares = gather_object(whole, {.group_dst = to, .group = group_, .where = options_.where});
  if (!mine) return;
  for (auto& share : shares) whole.state.merge(share.state);
  consolidated_ = std::move(whole);
}

OptimizerStateDict ZeroCore::state_dict() const {
  if (!consolidated_) {
    refuse("state_dict: this rank has only its own share of the state. Call consolidate_state_dict(to = ",
           group_->rank(), ") on all ranks after the last step");
  }
  return *consolidated_;
}

void ZeroCore::load_state_dict(const OptimizerStateDict& dict) {
  adopt_changes();
  check_state_dict_fits(*this, dict);
  OptimizerStateDict share;
  for (std::size_t g = 0; g < owners_.size(); ++g) {
    auto& group = share.param_groups.emplace_back();
    group.options = dict.param_groups[g].options;
    for (std::size_t i = 0; i < owners_[g].size(); ++i) {
      if (owners_[g][i] != group_->rank()) continue;
      const std::int64_t number = dict.param_groups[g].params[i];
      group.params.push_back(number);
      const auto state = dict.state.find(number);
      if (state == dict.state.end()) continue;
      move_tensors(share.state.emplace(number, state->second).first->second,
                   param_groups_[g].params()[i].device());
    }
  }
  {
    const internal::Lend lend(*this, *optim_, kShare);
    set_optimizer_state_dict(*optim_, share);
  }
  // Made anew: the options that were loaded are those it is constructed with.
  optim_ = make_(own_groups());
  add_initial_state();
  consolidated_.reset();
}

void ZeroCore::save(torch::serialize::OutputArchive& archive) const {
  write_state_dict(archive, state_dict());
}

void ZeroCore::load(torch::serialize::InputArchive& archive) {
  load_state_dict(read_state_dict(archive));
}

}  // namespace lockstep
