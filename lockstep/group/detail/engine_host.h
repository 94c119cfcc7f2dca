// What lockstep provides to an engine, over a store: log lines and a key-value space (lockstep_host in
// engine_abi.h). Torch-free, so that the comm band's tests run it under the sanitizers.
//
// Thread safety: the callbacks may be called from any thread. Blocking: only kv_get waits. Gets and sets use
// separate handles, so that a set never waits behind a get on one connection.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/store/store.h"

namespace lockstep::internal {

// Handles on one store, a connection each where the store has connections. All groups of a world share them,
// so that a thousand groups do not need thousands of connections.
struct StoreHandles {
  // Clones of `store`.
  static StoreHandles open(Store& store);
  // The same handles, for keys under a prefix.
  StoreHandles under(const std::string& prefix) const;

  std::shared_ptr<Store> sets;
  std::shared_ptr<Store> gets;
  std::shared_ptr<Store> checks;  // short checks only
};

// Waits until all keys exist: false when the deadline expired first. Raises kPeerLost soon after `failed_key`
// appears in `failures`: the rank that wrote it will never write the others. Holds the store's handle for a
// fraction of a second at a time. A long wait logs waiting(), when given.
bool await_keys(Store& store, const std::vector<std::string>& keys, Store& failures,
                const std::string& failed_key, Deadline deadline,
                const std::function<std::string()>& waiting = {});

class EngineHost {
 public:
  struct Stores {
    // Separate handles on the three.
    static Stores clone(Store& engine, Store& root, Store& group);

    StoreHandles engine;           // where the engine's keys go
    std::shared_ptr<Store> root;   // where those that begin with "/" go: the whole store of the job
    std::shared_ptr<Store> group;  // where ranks that fail to join report it
  };
  // A get ends with LOCKSTEP_PEER_LOST soon after `failed_key` appears in the group's store: the rank that
  // wrote it will never write what the engine waits for. `launch_ranks`: the launcher's number of rank i of
  // the communicator; empty: i; -1: the launcher does not know the rank. An engine asks for
  // "/lockstep/exit/<i>" and gets LOCKSTEP_UNSUPPORTED where nobody will ever write it: without a launcher,
  // or with one that does not know the rank.
  EngineHost(Stores stores, std::string failed_key, std::vector<int> launch_ranks = {});
  ~EngineHost();
  EngineHost(const EngineHost&) = delete;
  EngineHost& operator=(const EngineHost&) = delete;

  // Valid as long as this object.
  const lockstep_host* table() const { return &table_; }

 private:
  std::optional<std::string> root_key(const char* key) const;
  static void log(void* context, int level, const char* text);
  static lockstep_status kv_set(void* context, const char* key, const void* value, size_t length);
  static lockstep_status kv_get(void* context, const char* key, void* value, size_t capacity, size_t* length,
                                int64_t deadline_ns);

  const Stores stores_;
  const std::string failed_key_;
  const std::vector<int> launch_ranks_;
  const lockstep_host table_;
};

}  // namespace lockstep::internal
