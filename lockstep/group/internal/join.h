// Making and closing groups, for the world above them. Torch-free. Private to group/.
#pragma once

#include <memory>
#include <source_location>
#include <string>

#include "lockstep/engine/engine.h"
#include "lockstep/group/process_group.h"
#include "lockstep/store/store.h"

namespace lockstep::internal {

// A group of one: nothing to send. `store` may be null.
Group make_solo_group(std::string name, std::shared_ptr<Store> store, Milliseconds timeout);

// How to join a group over an engine.
struct JoinOptions {
  const comm::Engine* engine;
  std::shared_ptr<Store> store;         // the group's own part
  std::shared_ptr<Store> engine_store;  // the engine's part of that
  std::shared_ptr<Store> root;          // the job's whole store
  std::string failed_key;  // in `store`: a rank that cannot join writes it, and the others stop waiting
  int rank;
  int size;
  std::string name;
  Milliseconds timeout;
};
// Collective: blocks until all ranks have joined or the timeout passes.
Group make_engine_group(JoinOptions options);

// Leaves, once: settles operations in flight, then tells the others. An empty cause is an orderly leave.
void close_group(ProcessGroup& group, const std::string& cause);

// "train.cpp:42", cut at the front when the path is long. Fits kWhereCapacity with its end.
inline constexpr std::size_t kWhereCapacity = 256;
void write_where(const std::source_location& where, char* out);

}  // namespace lockstep::internal
