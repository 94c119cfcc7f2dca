#include "launch/run_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>
#include <sstream>

#include "lockstep/base/detail/environment_verbatim.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

constexpr int kMaxWorkers = 4096;
constexpr int kDefaultPort = 29500;

std::optional<int> parse_int(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// What CUDA would show of `n` devices: the list up to the first entry that is no device.
int count_visible(const std::string& list, int n) {
  int n_visible = 0;
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto number = parse_int(entry);
    const bool by_name = entry.starts_with("GPU-") || entry.starts_with("MIG-");
    if (!by_name && !(number && *number >= 0 && *number < n)) break;
    ++n_visible;
  }
  return std::min(n, n_visible);
}

// NVIDIA's device files /dev/nvidia0, 1, ...; or what CUDA_VISIBLE_DEVICES leaves of them.
int count_gpus(const std::string& devices) {
  int n = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(devices, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("nvidia") && parse_int(std::string_view(name).substr(6)).value_or(-1) >= 0) ++n;
  }
  const auto visible = base::environment_verbatim(base::EnvVar::kCudaVisibleDevices);
  return visible ? count_visible(*visible, n) : n;
}

}  // namespace

int parse_processes(const std::string& text, const std::string& devices) {
  if (text == "auto" || text == "cpu") return base::available_cores();
  if (text == "gpu") {
    if (const int n = count_gpus(devices); n > 0) return n;
    base::raise(ErrorKind::kUsage, "--nproc-per-node gpu: no GPU is visible here; use cpu or auto");
  }
  const auto n = parse_int(text);
  if (n && *n >= 1 && *n <= kMaxWorkers) return *n;
  base::raise(ErrorKind::kUsage, base::cat("--nproc-per-node must be auto, cpu, gpu or a number from 1 to ",
                                           kMaxWorkers, ", but is \"", text, "\""));
}

int parse_nodes(const std::string& text) {
  const auto colon = text.find(':');
  const auto least = parse_int(std::string_view(text).substr(0, colon));
  const auto most = colon == std::string::npos ? least : parse_int(std::string_view(text).substr(colon + 1));
  if (!least || !most || *least < 1 || *least > *most) {
    base::raise(ErrorKind::kUsage,
                base::cat("--nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, but is \"", text, "\""));
  }
  if (*least != *most) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("--nnodes ", text, ": jobs that change their size are not supported; use ", *most));
  }
  return *least;
}

RunPlan make_plan(const RunOptions& options) {
  RunPlan plan{.n_workers = parse_processes(options.processes),
               .n_nodes = parse_nodes(options.nodes),
               .node_rank = options.node_rank,
               .master_addr = options.master_addr};
  if (plan.node_rank < 0 || plan.node_rank >= plan.n_nodes) {
    base::raise(ErrorKind::kUsage,
                base::cat("--node-rank must be from 0 to ", plan.n_nodes - 1, ", but is ", plan.node_rank));
  }
  const int port = options.master_port >= 0 ? options.master_port : plan.n_nodes > 1 ? kDefaultPort : 0;
  if (port > 65535 || (port == 0 && plan.n_nodes > 1)) {
    base::raise(ErrorKind::kUsage, base::cat("--master-port ", port, " is not a port all hosts can know"));
  }
  plan.master_port = static_cast<std::uint16_t>(port);
  if (!(options.grace_s >= 0) || options.grace_s > 1e6) {
    base::raise(ErrorKind::kUsage, base::cat("--grace must be a number of seconds, not ", options.grace_s));
  }
  plan.grace = Milliseconds(std::llround(options.grace_s * 1000));
  if (options.command.empty())
    base::raise(ErrorKind::kUsage, "no program to run: lockstep run -n 4 -- program arguments");
  return plan;
}

}  // namespace lockstep::launch
