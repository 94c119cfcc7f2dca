// How a DistributedDataParallel is made and changed: the checks of module and options, its reducer and the
// parts around it, another group, hooks and optimizers. What happens around each forward pass is in
// ddp_forward.cpp.
//
// Collective here: the constructor's comparison and broadcast (init_sync), and make_reducer(), where buckets
// agree on whether large gradients are reduced in place. The others change this rank alone, but what they
// change decides which collectives the next passes run: all ranks must make the same calls, in the same order
// between passes.
//
// Threads: all of it is called by the thread that owns the model, between passes. The callbacks that are
// installed here (on_average) run on the thread that calls backward(), inside the reducer's end of a pass;
// that thread is inside the model then, so neither needs a lock.
//
// What holds between calls:
//   - reduced_ and delayed_ divide the trained parameters between them and are constant after construction:
//     a parameter that is added later is refused (check_nothing_added), not reduced;
//   - buffers_, join_, reducer_ and delayed_reduction_ belong to group_ and are replaced together;
//   - hooks, optimizers and the sampling rate are kept here as well, and given to every new reducer.
#include "lockstep/ddp/detail/ddp_core.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/internal/backward_optimizers.h"
#include "lockstep/ddp/internal/buffer_sync.h"
#include "lockstep/ddp/internal/ddp_join.h"
#include "lockstep/ddp/internal/delayed_reduction.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/reducer.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"
#include "lockstep/optim/detail/sharded_over.h"

namespace lockstep {
namespace {

// On the meta device a parameter has sizes and no bytes: nothing to broadcast, nothing to reduce.
void check_materialised(const internal::NamedTensors& parameters) {
  for (std::size_t i = 0; i < parameters.tensors.size(); ++i) {
    if (!parameters.tensors[i].is_meta()) continue;
    base::raise(
        ErrorKind::kUsage,
        base::cat("DistributedDataParallel: parameter ", parameters.names[i],
                  " has no values yet (it is on the meta device); give it values, for example with a ",
                  "dry forward pass, before wrapping the module"));
  }
}

// In Python `out.weight = tokens.weight` registers the tensor; in C++ the old one stays registered.
void check_assigned(const internal::ModuleTensors& tensors, const DdpOptions& options) {
  const auto names = tensors.assigned_weights();
  if (names.empty()) return;
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
  const std::string text = base::cat(
      "DistributedDataParallel: ", list,
      ": the layer computes with another tensor than the parameter of that name. ",
      "Assigning to a member (out->weight = tokens->weight) ties nothing in C++: the old parameter stays "
      "registered, ",
      "is never used and gets no gradient. Use the shared tensor where it is needed, as in ",
      "torch::linear(x, tokens->weight), and leave the second layer out");
  if (!options.find_unused_parameters && !options.static_graph) base::raise(ErrorKind::kUsage, text);
  base::log(LogLevel::kWarn, text);
}

// The group to average over. It may still be empty, or one that this rank is not in: the constructor raises.
Group group_of(const DdpOptions& options) {
  if (!options.device_mesh) return options.group ? options.group : default_group();
  if (options.group)
    base::raise(ErrorKind::kUsage, "DistributedDataParallel: give group or device_mesh, not both");
  if (options.device_mesh->ndim() != 1) {
    base::raise(ErrorKind::kUsage,
                base::cat("DistributedDataParallel: device_mesh has ", options.device_mesh->ndim(),
                          " dimensions; give the one to average over, such as mesh[\"dp\"]"));
  }
  return options.device_mesh->get_group();
}

// A group that has two ranks of a parameter's own mesh would average different pieces of it.
void check_meshes(const internal::NamedTensors& parameters, const Group& group) {
  for (std::size_t i = 0; i < parameters.tensors.size(); ++i) {
    internal::refuse_own_mesh("DistributedDataParallel", parameters.names[i], parameters.tensors[i], group);
  }
}

BucketCaps caps_of(const DdpOptions& options) {
  return {.cap_mb = options.bucket_cap_mb, .cap_mb_list = options.bucket_cap_mb_list};
}

}  // namespace

// First what needs no other rank: options and module are usually wrong on all ranks alike, and all of them
// raise before anything is sent. A rank that raises alone is found missing by the others, in the comparison
// or at the first bucket, at the group's timeout.
DdpCore::DdpCore(std::shared_ptr<const internal::ModuleTensors> tensors,
                 std::shared_ptr<torch::nn::Module> module, DdpOptions options)
    : torch::nn::Module("DistributedDataParallel"),
      options_(std::move(options)),
      group_(group_of(options_)),
      tensors_(std::move(tensors)),
      steps_(std::make_shared<internal::BackwardOptimizers>()),
      static_graph_(options_.static_graph) {
  check_options();
  if (!is_group_member(group_)) {
    base::raise(ErrorKind::kUsage,
                base::cat("DistributedDataParallel: this rank is not a member of the group",
                          group_ ? base::cat(" \"", group_->name(), "\"") : std::string(),
                          ", so its gradients would not be averaged with anybody's; construct the "
                          "model on the group's ranks only"));
  }
  register_module("module", std::move(module));
  internal::check_ignored(*tensors_, options_.ignored);
  const internal::NamedTensors parameters = internal::parameters_of(*tensors_, options_.ignored);
  internal::NamedTensors trained = internal::trainable(parameters);
  if (trained.tensors.empty()) {
    base::raise(
        ErrorKind::kUsage,
        "DistributedDataParallel: the module has no parameter that requires a gradient, so it needs no "
        "wrapping");
  }
  check_materialised(parameters);
  check_assigned(*tensors_, options_);
  check_meshes(parameters, group_);
  // Frozen ones included: unfreezing one later is not adding one (check_nothing_added).
  known_ = parameters.tensors;
  // An invalid cap is an error in a world of one, too.
  describe_construction(trained, rebuilt_limits(caps_of(options_)).back());
  log_construction(trained, parameters.tensors.size());
  // Collective, hence the same condition on all ranks. Compared before anything is broadcast: with other
  // sizes a broadcast would mix up parameters, or not end.
  if (options_.init_sync && group_->size() > 1) {
    internal::verify_same_on_all_ranks(trained, group_, options_.where);
    std::vector<at::Tensor> synced = parameters.tensors;
    if (options_.broadcast_buffers) {
      const auto buffers = internal::buffers_of(*tensors_, options_.ignored).tensors;
      synced.insert(synced.end(), buffers.begin(), buffers.end());
    }
    internal::FlatBroadcast(group_, options_.where).run(synced);  // a temporary: frees its chunk memory
  }
  // Only now: the ranks compare all trained parameters above, delayed ones included.
  take_delayed(trained);
  // After the broadcast: what is sent is in full precision, and every rank casts the same values.
  prepare_precisions(parameters);
  reduced_ = std::make_unique<internal::NamedTensors>(std::move(trained));
  make_reducer(group_);
}

// Moves the parameters that are averaged outside the buckets from `trained` to delayed_. `sparse` is indexed
// as `trained` throughout: entries leave both at once.
void DdpCore::take_delayed(internal::NamedTensors& trained) {
  const auto& names = options_.delay_all_reduce_named_params;
  delayed_ = std::make_unique<internal::NamedTensors>();
  if (names.empty() != options_.param_to_hook_all_reduce.empty()) {
    base::raise(ErrorKind::kUsage,
                "DistributedDataParallel: delay_all_reduce_named_params and param_to_hook_all_reduce belong "
                "together; one "
                "of them is empty");
  }
  const auto index_of = [&](const std::string& name) {
    const auto found = std::find(trained.names.begin(), trained.names.end(), name);
    if (found == trained.names.end()) {
      base::raise(ErrorKind::kUsage,
                  base::cat("DistributedDataParallel: \"", name,
                            "\", to be delayed, is not a parameter of the module that requires a gradient"));
    }
    return found - trained.names.begin();
  };
  if (!names.empty() && options_.find_unused_parameters) {
    base::raise(
        ErrorKind::kUsage,
        "DistributedDataParallel: delay_all_reduce_named_params needs a trigger that comes at the same "
        "place on all "
        "ranks, which find_unused_parameters does not promise; leave out one of them");
  }
  // Looked up before the loop below, which removes the delayed parameters: the trigger may be one of them.
  if (!names.empty())
    trigger_ = trained.tensors[static_cast<std::size_t>(index_of(options_.param_to_hook_all_reduce))];
  std::vector<bool> sparse = internal::sparse_gradients(*tensors_, trained);
  for (const std::string& name : names) {
    const auto index = index_of(name);
    delayed_->names.push_back(name);
    delayed_->tensors.push_back(trained.tensors[static_cast<std::size_t>(index)]);
    if (sparse[static_cast<std::size_t>(index)])
      base::raise(ErrorKind::kUsage, base::cat("DistributedDataParallel: ", name,
                                               " has sparse gradients and cannot be delayed"));
    sparse.erase(sparse.begin() + index);
    trained.names.erase(trained.names.begin() + index);
    trained.tensors.erase(trained.tensors.begin() + index);
  }
}

// In a world of one only for optimizers that step inside backward() and for mixed precision. The members
// are replaced only after everything has been created: no effect when it raises.
// Collective where there are other ranks: buckets and hooks compare and agree.
void DdpCore::make_reducer(const Group& group) {
  const bool alone = group->size() == 1;
  if (alone && !works_alone()) return;
  auto buffers = std::make_unique<internal::BufferSync>(
      internal::BufferSync::Options{.tensors = tensors_,
                                    .ignored = options_.ignored,
                                    .broadcasts = options_.broadcast_buffers,
                                    .hook = buffer_hook_,
                                    .group = group,
                                    .where = options_.where});
  std::shared_ptr<internal::DelayedReduction> delayed;
  if (!delayed_->tensors.empty())
    delayed = internal::DelayedReduction::create(*delayed_, trigger_, group, options_.where);
  // All trained parameters may be delayed ones: then there is nothing to put into buckets.
  if (!reduced_->tensors.empty()) {
    internal::ReducerOptions options{.group = group,
                                     .caps = caps_of(options_),
                                     .sparse = internal::sparse_gradients(*tensors_, *reduced_),
                                     .gradient_as_bucket_view = options_.gradient_as_bucket_view,
                                     .in_place_bytes = options_.in_place_bytes,
                                     .find_unused_parameters = options_.find_unused_parameters,
                                     .static_graph = static_graph_,  // the first plan depends on it
                                     .skip_all_reduce_unused_params = options_.skip_all_reduce_unused_params,
                                     .where = options_.where};
    if (options_.mixed_precision) options.reduce_dtype = options_.mixed_precision->reduced_in();
    options.precisions = precisions_;
    auto reducer = internal::Reducer::create(reduced_->tensors, reduced_->names, std::move(options));
    reducer->timer().set_sample_rate(sample_rate_);
    if (comm_hook_.run && !alone) reducer->register_comm_hook(comm_hook_);
    // By value, so that the reducer needs no pointer to this model: callbacks that libtorch has queued share
    // ownership of the reducer and may outlive the model.
    reducer->on_average(
        [steps = steps_](const at::Tensor& parameter, const at::Tensor& average) {
          return steps->step(parameter, average);
        },
        [steps = steps_] { steps->finish(); });
    // The old reducer ends here, and with it its hooks on the parameters. The new one's exist already, but no
    // gradient arrives in between.
    reducer_ = std::move(reducer);
    construction_.bucket_sizes = reducer_->stats().bucket_bytes;
  }
  buffers_ = std::move(buffers);
  join_ = std::make_unique<internal::DdpJoin>(group, options_.where);
  delayed_reduction_ = std::move(delayed);
}

bool DdpCore::works_alone() const {
  return steps_->any() || options_.mixed_precision.has_value();
}

// Outside any pass: buckets, hooks and the order of collectives all belong to one group.
void DdpCore::update_process_group(Group group) {
  if (join_options() != nullptr) base::raise(ErrorKind::kUsage, "update_process_group: not inside join()");
  if (torch::autograd::get_current_graph_task_id() != -1)
    base::raise(ErrorKind::kUsage, "update_process_group: not inside backward()");
  if (!group) group = default_group();
  if (!is_group_member(group))
    base::raise(ErrorKind::kUsage,
                base::cat("update_process_group: this rank is not a member of \"", group->name(), "\""));
  check_meshes(internal::parameters_of(*tensors_, options_.ignored), group);
  // The new buckets take the parameters' types as their own: they must be in full precision.
  if (precisions_) precisions_->restore();
  // Passes under the old group that have not finished are dropped with the reducer. group_ is set last: when
  // make_reducer() raises, the model keeps its old group and reducer.
  if (group->size() == 1 && !works_alone()) {
    reducer_ = nullptr;
    buffers_ = nullptr;
    join_ = nullptr;
    delayed_reduction_ = nullptr;
    // No reducer will step them: backward() calls the adopted optimizers again.
    steps_->release();
  } else {
    make_reducer(group);
  }
  group_ = std::move(group);
}

// The optimizer is attached first: works_alone() then holds, and in a world of one the reducer that steps it
// is made now.
void DdpCore::register_fused_optimizer(std::shared_ptr<FunctionalOptimizer> optimizer,
                                       const std::vector<at::Tensor>& only) {
  steps_->fuse(std::move(optimizer), only, reduced_->tensors,
               internal::sparse_gradients(*tensors_, *reduced_));
  if (!reducer_) make_reducer(group_);
}

void DdpCore::overlap_optimizer(ZeroCore& zero) {
  steps_->overlap(zero, group_, reduced_->tensors);
  if (!reducer_) make_reducer(group_);
}

// Here, where the members' types are complete. A NoSync guard may live on: it shares syncs_. So may a graph:
// it holds the reducer weakly (ddp_forward.cpp), and its gradients stay local from now on.
DdpCore::~DdpCore() = default;

// Buffers take their type for good; parameters only for the length of a pass (mixed_precision.h), so that
// optimizers and checkpoints see them in full precision.
void DdpCore::prepare_precisions(const internal::NamedTensors& parameters) {
  if (!options_.mixed_precision) return;
  const MixedPrecision& mixed = *options_.mixed_precision;
  internal::check_mixed_precision(mixed, parameters.tensors, options_.gradient_as_bucket_view);
  if (!delayed_->tensors.empty() || !tensors_->sparse_parameters().empty()) {
    base::raise(
        ErrorKind::kUnsupported,
        "DistributedDataParallel: mixed precision goes neither with sparse gradients (make the embeddings "
        "dense) nor "
        "with delay_all_reduce_named_params");
  }
  for (const auto& buffer : internal::buffers_of(*tensors_, options_.ignored).tensors) {
    if (mixed.buffer_dtype && buffer.is_floating_point()) buffer.set_data(buffer.to(*mixed.buffer_dtype));
  }
  if (mixed.param_dtype)
    precisions_ = std::make_shared<internal::LowPrecisionParameters>(parameters.tensors, *mixed.param_dtype);
}

std::shared_ptr<torch::nn::Module> DdpCore::cloned(const torch::nn::Module& module,
                                                   const std::optional<torch::Device>& device) {
  try {
    return module.clone(device);
  } catch (const c10::Error& error) {
    base::raise(ErrorKind::kUsage, base::cat("DistributedDataParallel: this module cannot be cloned: ",
                                             error.what_without_backtrace()));
  }
}

// As the model is now, not as it was made: group and static graph may have changed since.
DdpOptions DdpCore::options_of_clone() const {
  DdpOptions options = options_;
  options.group = group_;
  options.device_mesh.reset();
  // Equal originals have equal clones: nothing is compared or broadcast. make_reducer() stays collective.
  options.init_sync = false;
  options.static_graph = static_graph_;
  return options;
}

void DdpCore::check_options() const {
  if (options_.device_ids.size() > 1)
    base::raise(ErrorKind::kUsage,
                base::cat("DistributedDataParallel: device_ids has ", options_.device_ids.size(),
                          " entries; a process trains on one device"));
  const auto parameters = tensors_->parameters();
  for (const auto& parameter : parameters) {
    const c10::Device device = parameter.value().device();
    const bool given = !options_.device_ids.empty() || options_.output_device;
    if (given && !device.is_cuda()) {
      base::raise(
          ErrorKind::kUsage,
          "DistributedDataParallel: device_ids and output_device must stay empty for a module on the CPU");
    }
    if (!options_.device_ids.empty() && options_.device_ids.front() != device.index()) {
      base::raise(ErrorKind::kUsage,
                  base::cat("DistributedDataParallel: device_ids is ", options_.device_ids.front(),
                            ", parameter ", parameter.key(), " is on ", device.str()));
    }
  }
}

// Kept beyond buffers_, and in a world of one too, to which update_process_group() may add ranks later.
void DdpCore::register_buffer_hook(BufferHook hook) {
  if (!hook.run) base::raise(ErrorKind::kUsage, "register_buffer_hook: the hook is empty");
  if (buffer_hook_.run) base::raise(ErrorKind::kUsage, "register_buffer_hook: a model has one buffer hook");
  buffer_hook_ = std::move(hook);
  if (buffers_) buffers_->set_hook(buffer_hook_);
}

void DdpCore::register_comm_hook(CommHook hook) {
  if (!hook.run) base::raise(ErrorKind::kUsage, "register_comm_hook: the hook is empty");
  if (comm_hook_.run) {
    base::raise(ErrorKind::kUsage,
                base::cat("register_comm_hook: ", comm_hook_.name,
                          " is registered already; a model has one hook, and hooks can be chained"));
  }
  // The reducer raises when it is too late, and then the hook is not kept. Kept here, since
  // update_process_group() replaces the reducer.
  if (reducer_) reducer_->register_comm_hook(hook);
  comm_hook_ = std::move(hook);
}

// The reducer raises when it is too late. static_graph_ is set afterwards: make_reducer() hands it on.
void DdpCore::set_static_graph() {
  if (reducer_) {
    reducer_->set_static_graph();
    construction_.bucket_sizes = reducer_->stats().bucket_bytes;
  }
  static_graph_ = true;
}

void DdpCore::remove_autograd_hooks() {
  if (join_options() != nullptr || torch::autograd::get_current_graph_task_id() != -1)
    base::raise(ErrorKind::kUsage, "remove_autograd_hooks: not inside join() or backward()");
  if (steps_->any())
    base::raise(ErrorKind::kUsage, "remove_autograd_hooks: optimizers of this model step inside backward()");
  if (precisions_)
    base::raise(ErrorKind::kUnsupported,
                "remove_autograd_hooks: not with mixed precision, which needs the hooks itself");
  // buffers_ stays: buffers are still synchronised.
  reducer_ = nullptr;
  delayed_reduction_ = nullptr;
}

void DdpCore::check_reducer_finalized() const {
  if (reducer_) reducer_->check_finalized();
  if (delayed_reduction_) delayed_reduction_->check();
}

ReducerStats DdpCore::stats() const {
  return reducer_ ? reducer_->stats() : ReducerStats{};
}

torch::OrderedDict<std::string, at::Tensor> strip_prefix(
    const torch::OrderedDict<std::string, at::Tensor>& tensors, const std::string& prefix) {
  torch::OrderedDict<std::string, at::Tensor> result;
  for (const auto& item : tensors) {
    const std::string& key = item.key();
    result.insert(key.starts_with(prefix) ? key.substr(prefix.size()) : key, item.value());
  }
  return result;
}

}  // namespace lockstep
