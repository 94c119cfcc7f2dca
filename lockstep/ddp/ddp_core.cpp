#include "lockstep/ddp/ddp_core.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/ddp/internal/graph.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/group/collectives.h"
#include "lockstep/group/debug.h"
#include "lockstep/group/world.h"

namespace lockstep {
namespace {

void check_materialised(const internal::NamedTensors& parameters) {
  for (std::size_t i = 0; i < parameters.tensors.size(); ++i) {
    if (!parameters.tensors[i].is_meta()) continue;
    raise(ErrorKind::kUsage,
          cat("DistributedDataParallel: parameter ", parameters.names[i],
              " has no values yet (it lies on the meta device); give it values, for example with a ",
              "dry forward pass, before wrapping the module"));
  }
}

// How this one was built, for TORCH_DISTRIBUTED_DEBUG=INFO and above.
void tell_construction(const DdpOptions& options, const ProcessGroup& group,
                       const internal::NamedTensors& trained, std::size_t n_all) {
  if (get_debug_level() == DebugLevel::kOff || !log_enabled(LogLevel::kInfo)) return;
  std::int64_t n_bytes = 0;
  for (const auto& tensor : trained.tensors) n_bytes += static_cast<std::int64_t>(tensor.nbytes());
  std::string words = cat(
      "DistributedDataParallel over group \"", group.name(), "\" (rank ", group.rank(), " of ", group.size(),
      ", back end ", group.backend(), "): ", trained.tensors.size(), " of ", n_all, " parameters trained, ",
      n_bytes, " bytes; bucket_cap_mb ", options.bucket_cap_mb ? cat(*options.bucket_cap_mb) : "unset",
      ", gradient_as_bucket_view ", options.gradient_as_bucket_view, ", broadcast_buffers ",
      options.broadcast_buffers, ", init_sync ", options.init_sync);
  for (std::size_t i = 0; i < trained.tensors.size(); ++i) {
    words += cat("\n  ", trained.names[i], " ", trained.tensors[i].sizes(), " ",
                 c10::toString(trained.tensors[i].scalar_type()));
  }
  log(LogLevel::kInfo, words);
}

}  // namespace

DdpCore::DdpCore(std::shared_ptr<torch::nn::Module> module, DdpOptions options)
    : torch::nn::Module("DistributedDataParallel"),
      options_(std::move(options)),
      group_(options_.process_group ? options_.process_group : default_group()),
      wrapped_(std::move(module)) {
  check_options(wrapped_.get());
  register_module("module", wrapped_);
  internal::check_ignored(*wrapped_, options_.ignored);
  const internal::NamedTensors parameters = internal::parameters_of(*wrapped_, options_.ignored);
  internal::NamedTensors trained = internal::trainable(parameters);
  if (trained.tensors.empty()) {
    raise(ErrorKind::kUsage,
          "DistributedDataParallel: the module has no parameter that requires a gradient, so it needs no "
          "wrapping");
  }
  check_materialised(parameters);
  ReducerOptions reducer_options{
      .group = group_,
      .caps = {.cap_mb = options_.bucket_cap_mb, .cap_mb_list = options_.bucket_cap_mb_list},
      .sparse = internal::sparse_gradients(*wrapped_, trained),
      .gradient_as_bucket_view = options_.gradient_as_bucket_view,
      .find_unused_parameters = options_.find_unused_parameters,
      .static_graph = options_.static_graph,
      .skip_all_reduce_unused_params = options_.skip_all_reduce_unused_params,
      .where = options_.where};
  rebuilt_limits(reducer_options.caps);  // a bad cap is an error in a world of one, too
  tell_construction(options_, *group_, trained, parameters.tensors.size());
  if (group_->size() == 1) return;

  broadcast_ = std::make_unique<internal::FlatBroadcast>(group_, options_.where);
  if (options_.init_sync) {
    internal::verify_same_on_all_ranks(trained, group_, options_.where);
    std::vector<at::Tensor> tensors = parameters.tensors;
    if (options_.broadcast_buffers) {
      const auto buffers = internal::buffers_of(*wrapped_, options_.ignored).tensors;
      tensors.insert(tensors.end(), buffers.begin(), buffers.end());
    }
    internal::FlatBroadcast(group_, options_.where).run(tensors);  // its memory goes with it
  }
  reducer_ =
      Reducer::create(std::move(trained.tensors), std::move(trained.names), std::move(reducer_options));
}

DdpCore::~DdpCore() = default;

void DdpCore::check_options(const torch::nn::Module* module) const {
  if (module == nullptr) raise(ErrorKind::kUsage, "DistributedDataParallel: the module is null");
  if (!options_.device_ids.empty() || options_.output_device) {
    raise(ErrorKind::kUsage,
          "DistributedDataParallel: device_ids and output_device must stay empty for a module on the CPU");
  }
}

void DdpCore::before_forward() {
  if (!reducer_) return;
  const bool joining = join_options() != nullptr;
  if (joining) {
    check_answered();  // before anything is said
    begin_iteration();
    say(Has::kInput);
  }
  if (at::GradMode::is_enabled()) reducer_->prepare_for_forward();
  if (buffers_due_) sync_buffers(joining);
}

// Collected anew each time: users may rebind buffers.
void DdpCore::sync_buffers(bool joining) {
  if (buffer_hook_.run) {
    if (buffer_hook_.when == BufferHook::When::kBeforeForward) run_buffer_hook();
    return;
  }
  if (!options_.broadcast_buffers) return;
  const std::vector<at::Tensor> buffers = internal::buffers_of(*wrapped_, options_.ignored).tensors;
  if (!buffers.empty()) broadcast_->run(buffers, joining ? heard().highest_active : 0);
}

void DdpCore::run_buffer_hook() {
  const internal::NamedTensors named = internal::buffers_of(*wrapped_, options_.ignored);
  torch::OrderedDict<std::string, at::Tensor> buffers;
  for (std::size_t i = 0; i < named.names.size(); ++i) buffers.insert(named.names[i], named.tensors[i]);
  reducer_->await_too(buffer_hook_.run(buffers));
}

void DdpCore::register_buffer_hook(BufferHook hook) {
  if (!hook.run) raise(ErrorKind::kUsage, "register_buffer_hook: the hook is empty");
  if (buffer_hook_.run) raise(ErrorKind::kUsage, "register_buffer_hook: a model has one buffer hook");
  buffer_hook_ = std::move(hook);
}

void DdpCore::after_forward(const std::function<void(const Visitor&)>& visit_outputs) {
  if (!reducer_) return;
  buffers_due_ = at::GradMode::is_enabled() && *syncs_;
  std::vector<at::Tensor> outputs;
  const auto collect = [&](at::Tensor& output) { outputs.push_back(output); };
  if (buffers_due_) {
    if (buffer_hook_.run && buffer_hook_.when == BufferHook::When::kAfterForward) run_buffer_hook();
    if (reducer_->wants_sink()) visit_outputs(collect);
    if (reducer_->searches() && outputs.empty()) {
      raise(ErrorKind::kUsage,
            "DistributedDataParallel: find_unused_parameters found no tensor in what forward() returned; "
            "give its type "
            "a lockstep_visit function (lockstep/ddp/visit_tensors.h)");
    }
    reducer_->expect_backward(outputs);
    if (outputs.empty()) return;
    outputs = internal::pass_sink(
        outputs,
        [weak = std::weak_ptr(reducer_)] {
          if (const auto reducer = weak.lock()) reducer->on_backward_begins();
        },
        sink_clone_);
    std::size_t next = 0;
    visit_outputs([&](at::Tensor& output) { output = outputs[next++]; });
  } else if (at::GradMode::is_enabled()) {
    if (reducer_->searches()) visit_outputs(collect);
    reducer_->expect_local_backward(outputs);
  }
}

void DdpCore::register_comm_hook(CommHook hook) {
  if (reducer_) {
    reducer_->register_comm_hook(std::move(hook));
  } else if (!hook.run) {
    raise(ErrorKind::kUsage, "register_comm_hook: the hook is empty");
  }
}

void DdpCore::set_static_graph() {
  if (reducer_) reducer_->set_static_graph();
}

void DdpCore::check_reducer_finalized() const {
  if (reducer_) reducer_->check_finalized();
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
