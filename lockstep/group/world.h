// Entering and leaving the world: the default group of this process, or of this rank thread inside run_threads.
#pragma once

#include <functional>
#include <memory>
#include <source_location>
#include <string>

#include "lockstep/group/process_group.h"

namespace lockstep {

struct InitOptions {
  std::string backend{};      // "" or "host"; "" chooses
  std::string init_method{};  // "" means env://, unless store is given
  Milliseconds timeout = kDefaultGroupTimeout;
  int world_size = -1;  // -1: from the URL or the environment
  int rank = -1;
  std::shared_ptr<Store> store{};  // instead of init_method; then rank and world_size are required
  std::string group_name{};        // accepted for torch's sake, ignored
  std::source_location where = std::source_location::current();
};

// Creates the default group; blocks until all ranks have joined or the timeout passes. With nothing set in the
// environment: a world of one. Raises kUsage when a default group exists.
void init_process_group(InitOptions options = {});

// Leaves the default group (null), or another one. Every rank should call it; ranks that still use the group get
// kPeerLost. init_process_group may be called again afterwards. No-op when there is none to leave... see Errors:
// raises kUsage when group is null and nothing was initialised.
void destroy_process_group(Group group = {});

// Never throws.
bool is_available() noexcept;
bool is_initialized() noexcept;
bool is_torchelastic_launched() noexcept;
bool is_backend_available(const std::string& name) noexcept;

// The default group; raises kUsage saying so when there is none.
Group default_group();
int get_rank(const Group& group = {});
int get_world_size(const Group& group = {});
std::string get_backend(const Group& group = {});
// LOCAL_RANK, else `fallback` when it is not negative, else kUsage.
int get_node_local_rank(int fallback = -1);

// Runs fn(rank) on `n` threads, each a rank of a world of `n` of its own, already initialised; returns when all have
// ended. The first exception is thrown again, after the others have ended too (their operations raise kPeerLost
// naming the rank that threw first).
struct RunThreadsOptions {
  Milliseconds timeout = kDefaultGroupTimeout;
};
void run_threads(int n, const std::function<void(int rank)>& fn, RunThreadsOptions options = {});

}  // namespace lockstep
