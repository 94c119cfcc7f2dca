// From a `backend` text to engines, one part per engine with the device types it serves. Torch-free. Private
// to group/.
#pragma once

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
// What an empty text means for ranks on these hosts (host_identity() of each): the host engine when all are
// one, else the hierarchical one. Raises kUnsupported naming the ranks when there is none.
BackendParts choose_default_backend(const std::vector<std::string>& hosts);

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
