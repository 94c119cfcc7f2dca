// What lockstep lends to an engine, over a store: log lines and a key-value space (lockstep_host in
// engine_abi.h). Torch-free, so that the comm band's tests run it under the sanitizers.
//
// Thread safety: the callbacks may come from any thread. Blocking: only kv_get waits. Gets and sets use
// handles of their own, so that a set never waits behind a get on one connection.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/store/store.h"

namespace lockstep::internal {

// Handles on one store, a connection each where the store has connections. All groups of a world share them: a
// thousand groups must not mean thousands of connections.
struct StoreHandles {
  // Clones of `store`.
  static StoreHandles open(Store& store);
  // The same handles, for keys under a prefix.
  StoreHandles under(const std::string& prefix) const;

  std::shared_ptr<Store> sets;
  std::shared_ptr<Store> gets;
  std::shared_ptr<Store> checks;  // short looks only
};

// Waits until all keys exist: false when the deadline passed first. Raises kPeerLost soon after `failed_key` appears
// in `failures`: whoever wrote it will never write the others. Holds the store's handle for a fraction of a second at
// a time. A wait that lasts says waiting(), when there is one.
bool await_keys(Store& store, const std::vector<std::string>& keys, Store& failures,
                const std::string& failed_key, Deadline deadline,
                const std::function<std::string()>& waiting = {});

class EngineHost {
 public:
  struct Stores {
    // Handles of their own on the three.
    static Stores clone(Store& engine, Store& root, Store& group);

    StoreHandles engine;           // where the engine's keys go
    std::shared_ptr<Store> root;   // where those that begin with "/" go: the whole store of the job
    std::shared_ptr<Store> group;  // where ranks that give up say so
  };
  // A get ends with LOCKSTEP_PEER_LOST soon after `failed_key` appears in the group's store: whoever wrote it will
  // never write what the engine waits for. `launch_ranks`: what the launcher calls rank i of the communicator; empty:
  // i. An engine asks for "/lockstep/exit/<i>".
  EngineHost(Stores stores, std::string failed_key, std::vector<int> launch_ranks = {});
  ~EngineHost();
  EngineHost(const EngineHost&) = delete;
  EngineHost& operator=(const EngineHost&) = delete;

  // Valid as long as this object.
  const lockstep_host* table() const { return &table_; }

 private:
  std::string root_key(const char* key) const;
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
