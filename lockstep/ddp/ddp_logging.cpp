// What DistributedDataParallel reports of itself and of its reducer: in logging_data() and in the log.
#include <algorithm>
#include <iterator>
#include <optional>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/ddp/detail/ddp_core.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/reducer.h"
#include "lockstep/debug/debug.h"

namespace lockstep {
namespace {

// How many sampled steps there are when TORCH_DISTRIBUTED_DEBUG=DETAIL writes them to the log.
constexpr std::uint64_t kLoggedAt[] = {10, 20, 50, 100, 500, 800, 1000};

const char* name_of(DebugLevel level) {
  switch (level) {
    case DebugLevel::kInfo:
      return "INFO";
    case DebugLevel::kDetail:
      return "DETAIL";
    case DebugLevel::kOff:
      break;
  }
  return "OFF";
}

bool has_sync_bn(const torch::nn::Module& module) {
  const auto layers = module.modules();
  return std::ranges::any_of(
      layers, [](const auto& layer) { return layer->name().find("SyncBatchNorm") != std::string::npos; });
}

template <class T>
void add_once(std::vector<T>& to, T value) {
  if (std::ranges::find(to, value) == to.end()) to.push_back(std::move(value));
}

void describe_parameters(DdpLoggingData& data, const internal::NamedTensors& trained) {
  std::vector<c10::Device> devices;
  data.num_parameter_tensors = trained.tensors.size();
  data.parameter_names = trained.names;
  for (const at::Tensor& tensor : trained.tensors) {
    data.total_parameter_size_bytes += tensor.nbytes();
    add_once(data.dtypes, std::string(c10::toString(tensor.scalar_type())));
    add_once(devices, tensor.device());
  }
  data.is_multi_device_module = devices.size() > 1;
}

void describe_environment(DdpLoggingData& data) {
  const auto value = [](base::EnvVar var) { return base::environment(var).value_or(""); };
  data.master_addr = value(base::EnvVar::kMasterAddr);
  data.master_port = value(base::EnvVar::kMasterPort);
  data.cuda_visible_devices = value(base::EnvVar::kCudaVisibleDevices);
  data.torch_distributed_debug = name_of(get_debug_level());
  if (data.backend_name.find("gloo") == std::string::npos) return;
  data.gloo_socket_ifname = value(base::EnvVar::kGlooSocketIfname);
  data.gloo_device_transport = value(base::EnvVar::kGlooDeviceTransport);
}

// Since `start`; nothing for what did not happen.
std::optional<std::int64_t> since(std::int64_t start, std::int64_t stamp) {
  if (stamp == 0) return std::nullopt;
  return stamp - start;
}

void add_times(DdpLoggingData& data, const internal::StepTimes& step) {
  data.forward_compute_time = step.forward_time();
  data.backward_compute_time = step.compute_time();
  data.backward_comm_time = step.comm_time();
  data.backward_compute_comm_overlap_time = step.overlap_time();
  data.forward_compute_time_start = step.forward_start;
  data.forward_compute_time_end = step.forward_end;
  data.backward_compute_time_start = step.backward_start;
  data.backward_compute_time_end = step.compute_end;
  data.backward_time_end = step.backward_end;
  data.prev_iteration_grad_ready_order_indices = step.ready_order;
  const std::int64_t start = step.backward_start;
  for (const std::int64_t at : step.parameter_ready) data.parameter_ready_time.push_back(since(start, at));
  for (const internal::BucketTimes& bucket : step.buckets) {
    data.bucket_ready_time.push_back(since(start, bucket.ready));
    data.bucket_started_time.push_back(since(start, bucket.started));
    data.bucket_done_time.push_back(since(start, bucket.done));
    if (bucket.done == 0) continue;
    auto& first = data.backward_comm_time_start;
    if (first == 0 || bucket.started < first) first = bucket.started;
    data.backward_comm_time_end = std::max(data.backward_comm_time_end, bucket.done);
  }
}

// What the reducer did so far; the next forward pass's error, if there is one.
void add_reductions(DdpLoggingData& data, internal::Reducer& reducer) {
  const ReducerStats stats = reducer.stats();
  data.iteration = stats.n_reductions;
  data.unused_parameter_size = stats.unused_bytes;
  data.num_buckets_reduced = stats.last_n_buckets_reduced;
  data.has_rebuilt_buckets = stats.has_rebuilt_buckets;
  if (stats.has_rebuilt_buckets) {
    data.rebuilt_bucket_sizes = stats.bucket_bytes;
    data.rebuilt_per_bucket_param_indices = reducer.buckets();
  }
  data.can_set_static_graph = stats.n_reductions != 0 && stats.can_set_static_graph;
  try {
    reducer.check_finalized();
  } catch (const Error& error) {
    data.has_error = true;
    data.error = error.what();
  }
  const internal::StepTimer& timer = reducer.timer();
  data.sampled_steps = timer.n_recorded();
  const internal::StepTimer::Times average = timer.average();
  data.avg_forward_compute_time = average.forward;
  data.avg_backward_compute_time = average.compute;
  data.avg_backward_comm_time = average.comm;
  data.avg_backward_compute_comm_overlap_time = average.overlap;
  if (timer.n_recorded() != 0) add_times(data, timer.last());
}

}  // namespace

void DdpCore::describe_construction(const internal::NamedTensors& trained, std::size_t cap_bytes) {
  DdpLoggingData& data = construction_;
  const std::shared_ptr<torch::nn::Module> module = named_children()["module"];
  data.module_name = module->name();
  describe_parameters(data, trained);
  data.device_ids = options_.device_ids;
  data.output_device = options_.output_device;
  data.broadcast_buffers = options_.broadcast_buffers;
  data.has_sync_bn = has_sync_bn(*module);
  data.bucket_cap_bytes = cap_bytes;
  data.find_unused_parameters = options_.find_unused_parameters;
  data.gradient_as_bucket_view = options_.gradient_as_bucket_view;
}

// For TORCH_DISTRIBUTED_DEBUG=INFO and above. Before the ranks meet, since that is where construction may
// hang.
void DdpCore::log_construction(const internal::NamedTensors& trained, std::size_t n_all) const {
  if (get_debug_level() == DebugLevel::kOff || !base::log_enabled(LogLevel::kInfo)) return;
  std::string text = base::cat(
      "DistributedDataParallel over group \"", group_->name(), "\" (rank ", group_->rank(), " of ",
      group_->size(), ", back end ", group_->backend(), "): ", trained.tensors.size(), " of ", n_all,
      " parameters trained, ", construction_.total_parameter_size_bytes, " bytes; bucket_cap_mb ",
      options_.bucket_cap_mb ? base::cat(*options_.bucket_cap_mb) : "unset", ", gradient_as_bucket_view ",
      options_.gradient_as_bucket_view, ", broadcast_buffers ", options_.broadcast_buffers, ", init_sync ",
      options_.init_sync, ", find_unused_parameters ", options_.find_unused_parameters, ", static_graph ",
      options_.static_graph);
  for (std::size_t i = 0; i < trained.tensors.size(); ++i) {
    text += base::cat("\n  ", trained.names[i], " ", trained.tensors[i].sizes(), " ",
                      c10::toString(trained.tensors[i].scalar_type()));
  }
  base::log(LogLevel::kInfo, text);
}

DdpLoggingData DdpCore::logging_data() const {
  DdpLoggingData data = construction_;
  data.world_size = group_->size();
  data.rank = group_->rank();
  data.backend_name = group_->backend();
  describe_environment(data);
  data.static_graph = static_graph_;
  data.comm_hook = comm_hook_.run ? comm_hook_.name : "";
  data.join_uneven_inputs = join_uneven_inputs_;
  if (reducer_) {
    data.parameter_names = reduced_->names;
    add_reductions(data, *reducer_);
  }
  return data;
}

void DdpCore::set_ddp_runtime_logging_sample_rate(std::int64_t rate) {
  internal::StepTimer alone;  // says whether it is one
  (reducer_ ? reducer_->timer() : alone).set_sample_rate(rate);
  sample_rate_ = rate;
}

// For TORCH_DISTRIBUTED_DEBUG=DETAIL.
void DdpCore::log_statistics() {
  const std::uint64_t n = reducer_->timer().n_recorded();
  if (n == std::exchange(n_logged_, n)) return;
  if (std::ranges::find(kLoggedAt, n) == std::end(kLoggedAt) || get_debug_level() != DebugLevel::kDetail)
    return;
  if (base::log_enabled(LogLevel::kInfo))
    base::log(LogLevel::kInfo, base::cat("DistributedDataParallel statistics: ", logging_data().to_json()));
}

}  // namespace lockstep
