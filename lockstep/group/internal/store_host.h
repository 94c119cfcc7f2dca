// What lockstep lends to an engine, over a store: log lines and a key-value space (lockstep_host in
// engine_abi.h). Torch-free, so that the comm band's tests run it under the sanitizers.
//
// Thread safety: the callbacks may come from any thread. Blocking: only kv_get waits. Gets and sets use
// handles of their own, so that a set never waits behind a get on one connection.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/store/store.h"

namespace lockstep::internal {

class StoreHost {
 public:
  struct Stores {
    Store& engine;  // where the engine's keys go
    Store& root;    // where those that begin with "/" go: the whole store of the job
    Store& group;   // where ranks that give up say so
  };
  // Clones the stores. A get ends with LOCKSTEP_PEER_LOST soon after `failed_key` appears in the group's store:
  // whoever wrote it will never write what the engine waits for.
  StoreHost(const Stores& stores, std::string failed_key);
  ~StoreHost();
  StoreHost(const StoreHost&) = delete;
  StoreHost& operator=(const StoreHost&) = delete;

  // Valid as long as this object.
  const lockstep_host* table() const { return &table_; }

 private:
  bool await(Store& store, const std::string& key, Deadline deadline);
  static void log(void* context, int level, const char* text);
  static lockstep_status kv_set(void* context, const char* key, const void* value, size_t length);
  static lockstep_status kv_get(void* context, const char* key, void* value, size_t capacity, size_t* length,
                                int64_t deadline_ns);

  const std::unique_ptr<Store> sets_;
  const std::unique_ptr<Store> gets_;
  const std::unique_ptr<Store> root_;
  const std::unique_ptr<Store> group_;
  const std::string failed_key_;
  const lockstep_host table_;
};

}  // namespace lockstep::internal
