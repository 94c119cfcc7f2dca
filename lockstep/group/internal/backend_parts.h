// From a `backend` text to engines, one part per engine with the device types it serves. Torch-free. Private
// to group/.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/engine/loader.h"
#include "lockstep/group/backends.h"

namespace lockstep::internal {

struct BackendPart {
  const comm::Engine* engine;
  std::vector<std::string> devices;
};
using BackendParts = std::vector<BackendPart>;

// "host", "cpu:host", "cpu:host,meta:fake", in any case. Raises kUsage for a malformed text, kUnsupported
// naming what exists for an unknown name and for a device type the engine does not serve.
BackendParts parse_backend(const std::string& backend);
// Where a rank runs, as it tells the others when the back end is left to lockstep.
struct RankPlace {
  std::string host;                        // host_identity()
  std::string gpu{};                       // device_identity of its GPU; "": it has none, or no engine for it
  std::vector<std::string> gpu_engines{};  // that it can load
};
// One line of text, and back. What another rank wrote is taken as it is: the worst it can do is to choose badly.
std::string to_line(const RankPlace& place);
RankPlace from_line(const std::string& line);
// Of this process; `device` is the GPU that the rank was bound to, unset: see own_gpu in backends.cpp.
RankPlace own_place(std::optional<int> device);
// What an empty text means for ranks at these places, a function of them alone, so that all ranks choose alike.
// For CPU tensors the host engine when all are on one host, else the hierarchical one. For CUDA tensors, where
// every rank has a GPU: cuda_ipc where ranks share one and all are on one host, else NCCL, else cuda_ipc on one
// host; none where no engine is common to all. Raises kUnsupported naming the ranks when CPU tensors have none.
BackendParts choose_default_backend(const std::vector<RankPlace>& places);

// Only engines of device memory. Such a group gets the default part for CPU tensors as well: counts, objects and
// barriers are host data, and need no way through a GPU.
bool lacks_host_memory(const BackendParts& parts);
// `host`'s part for CPU tensors, then all of `parts`.
BackendParts with_host_memory(const BackendParts& host, BackendParts parts);

// Engines by name, the built-in ones included.
comm::EngineRegistry& engines();
// The engine of that name, loading what can be loaded by name; null when there is none.
const comm::Engine* find_engine(const std::string& name);

// It stands for all ranks itself: nobody else comes to a meeting.
bool has_no_peers(const comm::Engine& engine);
// A group of one still goes through it; other engines have nothing to do there.
bool runs_alone(const comm::Engine& engine);

// Lent to a registered factory while this thread joins a group through an engine table.
class JoiningScope {
 public:
  explicit JoiningScope(const BackendOptions& options);
  ~JoiningScope();
  JoiningScope(const JoiningScope&) = delete;
  JoiningScope& operator=(const JoiningScope&) = delete;
};

// The back end behind a communicator of such a table; null when it is of another engine.
std::shared_ptr<Backend> backend_of(comm::Communicator& comm, const comm::Engine& engine);
// A table whose communicators are made by `factory`. Lives as long as the process.
const lockstep_engine* make_backend_table(std::string name, BackendFactory factory);

}  // namespace lockstep::internal
