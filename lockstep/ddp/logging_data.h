// Diagnostics of a DistributedDataParallel model: configuration, counters, and where the time of a step went.
// Names are those of torch's get_ddp_logging_data, so tools for those can read these.
//
//   std::cout << model->logging_data().to_json() << '\n';
//
// Thread safety: a value, a snapshot at the time of the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// One in this many steps is timed, after the first ten.
inline constexpr std::int64_t kDefaultLoggingSampleRate = 100;

struct DdpLoggingData {
  // ---- as built ----
  int world_size = 0;
  int rank = 0;  // in the model's group
  std::string module_name{};
  bool is_multi_device_module = false;
  std::size_t num_parameter_tensors = 0;  // trainable ones
  std::uint64_t total_parameter_size_bytes = 0;
  std::vector<std::string> parameter_names{};  // index lists below refer to these
  std::vector<std::string> dtypes{};
  std::vector<std::size_t> bucket_sizes{};  // bytes, of the first iteration; empty in a world of one
  std::vector<int> device_ids{};
  std::optional<int> output_device{};
  bool broadcast_buffers = false;
  bool has_sync_bn = false;
  std::uint64_t bucket_cap_bytes = 0;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
  std::string backend_name{};
  std::string comm_hook{};  // empty: none
  bool join_uneven_inputs = false;
  // The environment; empty where unset.
  std::string master_addr{}, master_port{}, cuda_visible_devices{};
  std::string torch_distributed_debug{};  // OFF, INFO or DETAIL
  std::string gloo_socket_ifname{}, gloo_device_transport{};

  // ---- counters ----
  std::uint64_t iteration = 0;              // completely reduced backward passes
  std::uint64_t unused_parameter_size = 0;  // bytes this rank did not use in the last of them
  std::size_t num_buckets_reduced = 0;      // in the last of them
  bool has_rebuilt_buckets = false;
  std::vector<std::size_t> rebuilt_bucket_sizes{};
  std::vector<std::vector<std::size_t>> rebuilt_per_bucket_param_indices{};
  bool can_set_static_graph =
      false;  // the unused set has never changed; false before the first backward pass
  // What the next forward pass will raise.
  bool has_error = false;
  std::string error{};

  // ---- the last step that was sampled (DdpCore::set_ddp_runtime_logging_sample_rate); nanoseconds ----
  std::uint64_t sampled_steps = 0;  // so far; averages are taken over these
  std::int64_t forward_compute_time = 0, avg_forward_compute_time = 0;
  std::int64_t backward_compute_time = 0, avg_backward_compute_time = 0;
  std::int64_t backward_comm_time = 0, avg_backward_comm_time = 0;  // while any bucket was being reduced
  std::int64_t backward_compute_comm_overlap_time = 0, avg_backward_compute_comm_overlap_time = 0;
  // Stamps of CLOCK_MONOTONIC, which all ranks of a host share.
  std::int64_t forward_compute_time_start = 0, forward_compute_time_end = 0;
  std::int64_t backward_compute_time_start = 0, backward_compute_time_end = 0;
  std::int64_t backward_comm_time_start = 0, backward_comm_time_end = 0;
  std::int64_t backward_time_end = 0;  // the averages were delivered
  std::vector<std::size_t> prev_iteration_grad_ready_order_indices{};
  // Relative to backward_compute_time_start: per parameter, and per bucket; unset for what did not happen.
  // `done` is when the group or the communication hook completed the bucket, not when it was waited for.
  std::vector<std::optional<std::int64_t>> parameter_ready_time{};
  std::vector<std::optional<std::int64_t>> bucket_ready_time{}, bucket_started_time{}, bucket_done_time{};

  // One object on one line, one member per field; -1 for what is unset, as torch writes it.
  std::string to_json() const;
};

}  // namespace lockstep
