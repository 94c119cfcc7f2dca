#include "lockstep/group/backends.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <mutex>
#include <sstream>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/engine/fake_engine.h"
#include "lockstep/group/internal/backend_parts.h"
#include "lockstep/hierarchy/hierarchy.h"
#include "lockstep/host/host.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep {
namespace internal {
namespace {

using Names = std::vector<std::string>;

// Torch's names of device types that tensors can be on.
const Names kDeviceTypes{"cpu", "cuda", "hip",           "hpu", "ipu", "meta",
                         "mps", "mtia", "privateuseone", "xla", "xpu"};

std::string joined(const Names& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// What is known of engines beyond their tables. Guarded by its mutex. By lower-case name. Engines themselves
// are in the registry; this is what the ABI does not tell.
struct Knowledge {
  std::mutex mutex;
  std::map<std::string, Names> devices{{"fake", {"cpu", "cuda", "meta", "xpu"}}};  // others: by capabilities
  std::map<std::string, std::string> defaults{
      {"cpu", "host"}, {"cuda", "nccl"}, {"xpu", "xccl"}, {"mps", "gloo"}, {"meta", "fake"}};
  Names alone{"fake"};  // engines that also serve groups of one
};

Knowledge& knowledge() {
  static auto& instance = *new Knowledge;  // leaked on purpose, as the engines
  return instance;
}

// By the memory that it takes, unless something else is known.
Names devices_of(const comm::Engine& engine) {
  const std::lock_guard lock(knowledge().mutex);
  const auto found = knowledge().devices.find(comm::lower_case(engine.name()));
  if (found != knowledge().devices.end()) return found->second;
  Names names;
  if (engine.takes(LOCKSTEP_HOST_MEMORY)) names.emplace_back("cpu");
  if (engine.takes(LOCKSTEP_CUDA)) names.emplace_back("cuda");
  return names;
}

// What can be named: engines that are there, and those that would be loaded or made when they are asked for.
// Only for messages: folders are listed, nothing is loaded.
Names engine_names() {
  Names names = engines().names();
  for (const auto& folder : comm::engine_folders()) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
      const std::string file = entry.path().filename().string();
      if (!file.starts_with("lockstep_") || !file.ends_with(".so")) continue;
      names.push_back(file.substr(9, file.size() - 12));
      if (names.back() == "gloo") names.push_back("hierarchical");
    }
  }
  std::ranges::sort(names);
  const auto twice = std::ranges::unique(names);
  names.erase(twice.begin(), twice.end());
  return names;
}

const comm::Engine& require_engine(const std::string& name, const std::string& backend) {
  if (const comm::Engine* engine = find_engine(name)) return *engine;
  base::raise(
      ErrorKind::kUnsupported,
      base::cat("backend \"", backend, "\": there is no engine \"", name, "\"; there are ",
                joined(engine_names()), ". load_engine() adds plug-ins, and so does a file lockstep_", name,
                ".so in a folder of ", "LOCKSTEP_ENGINE_PATH; register_backend() adds your own"));
}

[[noreturn]] void refuse_text(const std::string& backend, const std::string& why) {
  base::raise(ErrorKind::kUsage,
              base::cat("backend \"", backend, "\": ", why,
                        "; write one engine (\"host\") or one pair of device type and engine per device "
                        "type (\"cpu:host,meta:fake\")"));
}

void add_pair(BackendParts& parts, const std::string& device, const comm::Engine& engine,
              const std::string& backend) {
  for (const auto& part : parts) {
    if (std::ranges::count(part.devices, device) > 0)
      refuse_text(backend, base::cat("device type ", device, " repeats"));
  }
  if (const auto served = devices_of(engine); std::ranges::count(served, device) == 0) {
    base::raise(ErrorKind::kUnsupported, base::cat("backend \"", backend, "\": engine ", engine.name(),
                                                   " serves ", joined(served), ", not ", device));
  }
  const auto found = std::ranges::find(parts, &engine, &BackendPart::engine);
  if (found == parts.end()) {
    parts.push_back({&engine, {device}});
  } else {
    found->devices.push_back(device);
  }
}

void check_devices(const std::string& name, const Names& devices) {
  if (devices.empty())
    base::raise(ErrorKind::kUsage, base::cat("register_backend \"", name, "\": it serves no device type"));
  for (const auto& device : devices) {
    if (std::ranges::count(kDeviceTypes, device) == 0) {
      base::raise(ErrorKind::kUsage, base::cat("register_backend \"", name, "\": \"", device,
                                               "\" is not a device type; there are ", joined(kDeviceTypes)));
    }
  }
}

void remember(const std::string& name, const Names& devices) {
  const std::lock_guard lock(knowledge().mutex);
  knowledge().devices[name] = devices;
  knowledge().alone.push_back(name);
  for (const auto& device : devices) knowledge().defaults.try_emplace(device, name);
}

}  // namespace

comm::EngineRegistry& engines() {
  static comm::EngineRegistry& registry = []() -> comm::EngineRegistry& {
    // Leaked on purpose: groups refer to engines until the very end of the process.
    auto* made = new comm::EngineRegistry;
    made->add(comm::Engine(comm::host_engine(), "built in"));
    made->add(comm::Engine(comm::fake_engine(), "built in"));
    return *made;
  }();
  return registry;
}

namespace {

// Made when first asked for: it needs an engine that crosses hosts, a plug-in.
const comm::Engine* hierarchical_engine() {
  // One at a time: loading the plug-in and adding the engine must happen once.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const comm::Engine* made = engines().find("hierarchical")) return made;
  const comm::Engine* const across = engines().find_or_load("gloo");
  if (across == nullptr) return nullptr;
  // Leaked on purpose, as the engines.
  static const auto& engine = *new comm::HierarchicalEngine(*engines().find("host"), *across);
  return &engines().add(comm::Engine(engine.table(), "built in, over host and gloo"));
}

}  // namespace

const comm::Engine* find_engine(const std::string& name) {
  return comm::lower_case(name) == "hierarchical" ? hierarchical_engine() : engines().find_or_load(name);
}

bool has_no_peers(const comm::Engine& engine) {
  return engine.given() == comm::fake_engine();
}

bool runs_alone(const comm::Engine& engine) {
  const std::lock_guard lock(knowledge().mutex);
  return std::ranges::count(knowledge().alone, comm::lower_case(engine.name())) > 0;
}

// A name alone stands for all device types that the engine serves; pairs name them one by one, and two
// devices with one engine share a part.
BackendParts parse_backend(const std::string& backend) {
  const std::string text = comm::lower_case(backend);
  BackendParts parts;
  if (text.find(':') == std::string::npos && text.find(',') == std::string::npos) {
    const auto& engine = require_engine(text, backend);
    return {{&engine, devices_of(engine)}};
  }
  std::istringstream in(text);
  for (std::string pair; std::getline(in, pair, ',');) {
    const auto colon = pair.find(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == pair.size() ||
        pair.find(':', colon + 1) != std::string::npos) {
      refuse_text(backend, base::cat("\"", pair, "\" is not a pair"));
    }
    const std::string device = pair.substr(0, colon);
    if (std::ranges::count(kDeviceTypes, device) == 0)
      refuse_text(backend, base::cat("\"", device, "\" is not a device type of torch"));
    add_pair(parts, device, require_engine(pair.substr(colon + 1), backend), backend);
  }
  if (text.ends_with(',')) refuse_text(backend, "it ends with a comma");
  return parts;
}

namespace {

// The GPU engines lockstep knows, in the order they are preferred where each rank has a GPU of its own.
const Names kGpuEngines{"nccl", "cuda_ipc"};

// One that is not there, or that finds no driver, is no error: nobody has asked for it.
const comm::Engine* find_quietly(const std::string& name) {
  try {
    return find_engine(name);
  } catch (const Error& error) {
    base::log(LogLevel::kDebug, base::cat("engine ", name, " is not used: ", error.what()));
    return nullptr;
  }
}

// The rank's GPU when it was not bound to one: its only one, or the one of its local rank.
int own_gpu(int n_gpus) {
  const auto local = base::environment_int(base::EnvVar::kLocalRank);
  return n_gpus > 1 && local && *local >= 0 ? static_cast<int>(*local % n_gpus) : 0;
}

bool on_one_host(const std::vector<RankPlace>& places) {
  return std::ranges::all_of(places, [&](const auto& place) { return place.host == places.front().host; });
}

// The first two ranks that share a GPU; -1 when none do.
std::pair<int, int> sharing_ranks(const std::vector<RankPlace>& places) {
  std::map<std::pair<std::string, std::string>, int> seen;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const auto [at, fresh] = seen.try_emplace({places[rank].host, places[rank].gpu}, static_cast<int>(rank));
    if (!fresh) return {at->second, static_cast<int>(rank)};
  }
  return {-1, -1};
}

// "": none. Every rank must be able to load it.
std::string choose_gpu_engine(const std::vector<RankPlace>& places) {
  const auto all_have = [&](const std::string& engine) {
    return std::ranges::all_of(places, [&](const auto& place) {
      return !place.gpu.empty() && std::ranges::count(place.gpu_engines, engine) > 0;
    });
  };
  const bool shared = sharing_ranks(places).first >= 0;
  if (on_one_host(places) && all_have("cuda_ipc") && (shared || !all_have("nccl"))) return "cuda_ipc";
  return all_have("nccl") ? "nccl" : "";
}

}  // namespace

bool lacks_host_memory(const BackendParts& parts) {
  return !parts.empty() && std::ranges::all_of(parts, [](const BackendPart& part) {
    return part.engine->takes(LOCKSTEP_CUDA) && !part.engine->takes(LOCKSTEP_HOST_MEMORY);
  });
}

BackendParts with_host_memory(const BackendParts& host, BackendParts parts) {
  for (const auto& part : host) {
    if (std::ranges::count(part.devices, "cpu") > 0) parts.insert(parts.begin(), {part.engine, {"cpu"}});
  }
  return parts;
}

std::string to_line(const RankPlace& place) {
  std::string line = base::cat(place.host, "\t", place.gpu, "\t");
  for (const auto& engine : place.gpu_engines) line += engine + " ";
  return line;
}

RankPlace from_line(const std::string& line) {
  RankPlace place;
  std::istringstream in(line);
  std::getline(in, place.host, '\t');
  std::getline(in, place.gpu, '\t');
  for (std::string engine; in >> engine;) place.gpu_engines.push_back(engine);
  return place;
}

RankPlace own_place(std::optional<int> device) {
  RankPlace place{.host = base::host_identity()};
  const int n_gpus = device_count(c10::kCUDA);
  if (n_gpus == 0) return place;
  for (const auto& name : kGpuEngines) {
    const comm::Engine* const engine = find_quietly(name);
    if (engine == nullptr || engine->table().device_identity == nullptr) continue;
    char text[256] = "";
    const int index = device.value_or(own_gpu(n_gpus));
    if (engine->table().device_identity(LOCKSTEP_CUDA, index, text, sizeof text) != LOCKSTEP_OK) continue;
    place.gpu = text;
    place.gpu_engines.push_back(name);
  }
  return place;
}

BackendParts choose_default_backend(const std::vector<RankPlace>& places) {
  const std::string gpu_engine = choose_gpu_engine(places);
  const auto with_gpu = [&](const std::string& cpu_engine) {
    if (gpu_engine.empty()) return parse_backend(cpu_engine);
    return parse_backend(base::cat("cpu:", cpu_engine, ",cuda:", gpu_engine));
  };
  std::vector<std::size_t> elsewhere;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    if (places[rank].host != places.front().host) elsewhere.push_back(rank);
  }
  if (elsewhere.empty()) return with_gpu("host");
  if (find_engine("hierarchical") != nullptr) return with_gpu("hierarchical");
  std::string ranks;
  for (const auto rank : elsewhere) ranks += base::cat(ranks.empty() ? "" : " ", rank);
  base::raise(ErrorKind::kUnsupported,
              base::cat("ranks ", ranks,
                        " are not on the host of rank 0, and no engine here crosses hosts; load one "
                        "(load_engine) and name it as backend"));
}

}  // namespace internal

void register_backend(const std::string& name, BackendFactory factory, RegisterBackendOptions options) {
  const std::string key = comm::lower_case(name);
  const bool plain =
      !key.empty() && std::ranges::all_of(key, [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  if (!plain)
    base::raise(ErrorKind::kUsage,
                base::cat("register_backend: \"", name, "\" is not a valid name; use letters, digits and _"));
  if (!factory)
    base::raise(ErrorKind::kUsage, base::cat("register_backend \"", name, "\": no factory given"));
  internal::check_devices(key, options.devices);
  // Never freed: communicators and messages refer to it until the process ends.
  const auto* table = internal::make_backend_table(key, std::move(factory));
  internal::engines().add(comm::Engine(table, "registered by the program"));
  internal::remember(key, options.devices);
}

void register_backend(const lockstep_engine* table, RegisterBackendOptions options) {
  comm::Engine engine(table, "registered by the program");
  const std::string key = comm::lower_case(engine.name());
  internal::check_devices(key, options.devices);
  internal::engines().add(std::move(engine));
  internal::remember(key, options.devices);
}

std::string get_default_backend_for_device(const std::string& device) {
  // "cuda:1" names a device, "cuda" its type.
  const std::string type = comm::lower_case(device.substr(0, device.find(':')));
  auto& known = internal::knowledge();
  const std::lock_guard lock(known.mutex);
  if (const auto found = known.defaults.find(type); found != known.defaults.end()) return found->second;
  base::raise(ErrorKind::kUsage,
              base::cat("no default back end for device type \"", type, "\"; register_backend adds one"));
}

}  // namespace lockstep
