#include "lockstep/ddp/logging_data.h"

#include <concepts>
#include <optional>
#include <string_view>

namespace lockstep {
namespace {

// Writes one flat object, member by member.
class JsonObject {
 public:
  template <class T>
  JsonObject& add(std::string_view name, const T& value) {
    text_ += text_.empty() ? "{" : ",";
    put(name);
    text_ += ':';
    put(value);
    return *this;
  }
  std::string finish() { return text_ + "}"; }

 private:
  void put(bool value) { text_ += value ? "true" : "false"; }
  template <std::integral T>
  void put(T value) {
    text_ += std::to_string(value);
  }
  // -1, not null: whoever reads these members expects numbers.
  template <class T>
  void put(const std::optional<T>& value) {
    put(value.value_or(-1));
  }
  void put(const std::string& value) { put(std::string_view(value)); }
  void put(std::string_view value);
  template <class T>
  void put(const std::vector<T>& values) {
    text_ += '[';
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i != 0) text_ += ',';
      put(values[i]);
    }
    text_ += ']';
  }

  std::string text_;
};

// Error messages may hold anything: what JSON does not take as it is goes as \u00xx. Bytes above 0x7f pass
// unchanged, as parts of UTF-8.
void JsonObject::put(std::string_view value) {
  constexpr char kHex[] = "0123456789abcdef";
  text_ += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      text_ += '\\';
      text_ += c;
    } else if (const auto byte = static_cast<unsigned char>(c); byte < 0x20) {
      text_ += "\\u00";
      text_ += kHex[byte >> 4];
      text_ += kHex[byte & 15];
    } else {
      text_ += c;
    }
  }
  text_ += '"';
}

}  // namespace

// The name in the text is that of the member. Nothing checks that all are listed: a member that is added to
// the struct must be added here, too.
#define LOCKSTEP_FIELD(field) add(#field, field)

std::string DdpLoggingData::to_json() const {
  JsonObject json;
  const auto add = [&](std::string_view name, const auto& value) { json.add(name, value); };
  LOCKSTEP_FIELD(world_size);
  LOCKSTEP_FIELD(rank);
  LOCKSTEP_FIELD(module_name);
  LOCKSTEP_FIELD(is_multi_device_module);
  LOCKSTEP_FIELD(num_parameter_tensors);
  LOCKSTEP_FIELD(total_parameter_size_bytes);
  LOCKSTEP_FIELD(parameter_names);
  LOCKSTEP_FIELD(dtypes);
  LOCKSTEP_FIELD(bucket_sizes);
  LOCKSTEP_FIELD(device_ids);
  LOCKSTEP_FIELD(output_device);
  LOCKSTEP_FIELD(broadcast_buffers);
  LOCKSTEP_FIELD(has_sync_bn);
  LOCKSTEP_FIELD(bucket_cap_bytes);
  LOCKSTEP_FIELD(find_unused_parameters);
  LOCKSTEP_FIELD(gradient_as_bucket_view);
  LOCKSTEP_FIELD(static_graph);
  LOCKSTEP_FIELD(backend_name);
  LOCKSTEP_FIELD(comm_hook);
  LOCKSTEP_FIELD(join_uneven_inputs);
  LOCKSTEP_FIELD(master_addr);
  LOCKSTEP_FIELD(master_port);
  LOCKSTEP_FIELD(cuda_visible_devices);
  LOCKSTEP_FIELD(torch_distributed_debug);
  LOCKSTEP_FIELD(gloo_socket_ifname);
  LOCKSTEP_FIELD(gloo_device_transport);
  LOCKSTEP_FIELD(iteration);
  LOCKSTEP_FIELD(unused_parameter_size);
  LOCKSTEP_FIELD(num_buckets_reduced);
  LOCKSTEP_FIELD(has_rebuilt_buckets);
  LOCKSTEP_FIELD(rebuilt_bucket_sizes);
  LOCKSTEP_FIELD(rebuilt_per_bucket_param_indices);
  LOCKSTEP_FIELD(can_set_static_graph);
  LOCKSTEP_FIELD(has_error);
  LOCKSTEP_FIELD(error);
  LOCKSTEP_FIELD(sampled_steps);
  LOCKSTEP_FIELD(forward_compute_time);
  LOCKSTEP_FIELD(avg_forward_compute_time);
  LOCKSTEP_FIELD(backward_compute_time);
  LOCKSTEP_FIELD(avg_backward_compute_time);
  LOCKSTEP_FIELD(backward_comm_time);
  LOCKSTEP_FIELD(avg_backward_comm_time);
  LOCKSTEP_FIELD(backward_compute_comm_overlap_time);
  LOCKSTEP_FIELD(avg_backward_compute_comm_overlap_time);
  LOCKSTEP_FIELD(forward_compute_time_start);
  LOCKSTEP_FIELD(forward_compute_time_end);
  LOCKSTEP_FIELD(backward_compute_time_start);
  LOCKSTEP_FIELD(backward_compute_time_end);
  LOCKSTEP_FIELD(backward_comm_time_start);
  LOCKSTEP_FIELD(backward_comm_time_end);
  LOCKSTEP_FIELD(backward_time_end);
  LOCKSTEP_FIELD(prev_iteration_grad_ready_order_indices);
  LOCKSTEP_FIELD(parameter_ready_time);
  LOCKSTEP_FIELD(bucket_ready_time);
  LOCKSTEP_FIELD(bucket_started_time);
  LOCKSTEP_FIELD(bucket_done_time);
  return json.finish();
}

}  // namespace lockstep
