// Worlds: sets of ranks that met over a store, each with a root group of all of them. Most programs have one,
// the default world of this process (inside run_threads, of this rank thread), entered by init_process_group.
// create_group creates others: independent of it and of each other, of any size, over any store.
// Thread safety: every function may be called from any thread; init_process_group, or create_group of one
// name, raises kUsage while another thread is inside the same call.
// Inside run_threads only the rank thread, and callbacks that run on its behalf, have its default world:
// other threads must pass a Group explicitly.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {

struct InitOptions {
  std::string
      backend{};  // "host", "cpu:host,cuda:nccl" (backends.h); "": by the ranks' hosts and GPUs (docs/gpu.md)
  std::string init_method{};  // "" means env://, unless store is given
  std::optional<Milliseconds>
      timeout{};  // of joining and of operations; unset: LOCKSTEP_TIMEOUT, else half an hour
  std::optional<int> world_size{};  // unset: from the URL or the environment
  std::optional<int> rank{};
  std::shared_ptr<Store> store{};  // instead of init_method; then rank and world_size are required
  // The device that this rank uses, "cuda:1": engines connect at once instead of with the first operation. It
  // also selects the device's back end where `backend` is "" (get_default_backend_for_device).
  std::optional<at::Device> device_id{};
  std::string pg_options{};  // settings of the GPU engine, "name=value" separated by spaces (docs/nccl.md)
  std::source_location where = std::source_location::current();
};

// Creates the default group; blocks until all ranks have joined or the timeout expires, whatever the timeout
// of `store`. With nothing set in the environment: a world of one, whose collectives are no-ops. Ranks must
// enter (and, after leaving, enter again) in step: one thread per rank, the same number of times. Raises
// kUsage when a default group exists or the options contradict each other, kUnsupported for a back end that
// is not available, kPeerLost when another rank could not join.
void init_process_group(InitOptions options = {});

struct CreateGroupOptions {
  std::shared_ptr<Store> store{};  // where its ranks meet; shared with the group
  std::optional<int> rank{};       // in the group, 0 to size - 1
  std::optional<int> size{};
  std::string name{};  // letters, digits, _ - . and :, not digits alone; the prefix of its keys in the store
  std::string backend{};                  // as in InitOptions
  std::optional<Milliseconds> timeout{};  // as in InitOptions
  std::string desc{};                     // ProcessGroup::desc()
  std::optional<at::Device> device_id{};  // as in InitOptions
  std::string pg_options{};               // as in InitOptions
  std::source_location where = std::source_location::current();
};
// A group without the default world: a world of its own, of the ranks that call this with the same name over
// the same store. store, rank, size and name are required. A process may be in any number of them, with
// different ranks, and in the default world as well. Blocks until all ranks have joined or the timeout
// expires.
// Ranks of the group are the ranks of its world: `src` and `dst` of collectives refer to them. Groups of some
// of its members: new_group(ranks, {.parent = group}), new_subgroups(n, {.group}), split_group, shrink_group
// (groups.h); they are named "<name>/1" and so on. Functions without a group argument, and DeviceMesh, use
// the default world. destroy_process_group(group) leaves it and the groups created from it; the name may then
// be used again, by all ranks.
// Raises kUsage for a missing or wrong option and for a name that an existing created group of this process
// (of this rank thread) has, kTimeout naming the ranks that did not arrive, kPeerLost when another rank could
// not join.
Group create_group(CreateGroupOptions options);

// Leaves one group or, for the root of a world (null: the default group), all groups of that world, in
// descending order of names; group numbering then starts again. A non-member's handle: no effect. Every rank
// should call it; ranks that still use the group get kPeerLost. Operations in flight get two seconds to
// complete, then the group is aborted; abort it first to leave immediately. Works stay valid; later
// operations on a retained handle raise kUsage. init_process_group may be called again. Raises kUsage when
// nothing was initialised, or for a group that is in none of this process's (rank thread's) worlds.
void destroy_process_group(Group group = {});

// Loads an engine plug-in (docs/engine-abi.md) and returns its name, for use as `backend`. Raises
// kUnsupported saying what is wrong with it, kUsage when an engine of that name exists already.
std::string load_engine(const std::string& path);

// Never throws.
bool is_available() noexcept;
bool is_initialized() noexcept;
bool is_torchelastic_launched() noexcept;
bool is_backend_available(const std::string& name) noexcept;
bool is_gloo_available() noexcept;
bool is_mpi_available() noexcept;
bool is_nccl_available() noexcept;
bool is_ucc_available() noexcept;
bool is_xccl_available() noexcept;

// The default group; raises kUsage saying so when there is none.
Group default_group();
// About a group; all raise kUsage for one that was destroyed. Both -1 when this rank is not a member.
int get_rank(const Group& group = {});
int get_world_size(const Group& group = {});
// The timeout of a group's later operations that have none of their own; kNoTimeout: none. Raises kUsage when
// it is not positive, and for non-members.
void set_timeout(Milliseconds timeout, const Group& group = {});
// ProcessGroup::backend() and backend_config(): one engine per device, "cpu:host". Raise kUsage for
// non-members.
std::string get_backend(const Group& group = {});
std::string get_backend_config(const Group& group = {});
// Ranks in the world of the group's members, in the order of their ranks in the group.
std::vector<int> get_process_group_ranks(const Group& group = {});
// Number of groups numbered in this world so far, including the default one and those of other ranks; 0
// before init_process_group.
int get_pg_count() noexcept;
// LOCAL_RANK, else `fallback`; raises kUsage when there is neither.
int get_node_local_rank(std::optional<int> fallback = {});

// Runs fn(rank) on `n` threads, each a rank of a separate world of `n`, already initialised; returns when all
// have ended. The first exception is rethrown after the others have ended too (their operations raise
// kPeerLost naming the rank that threw first). A rank thread cannot call it again.
// Threads share what libtorch keeps per process: the default generator and its seed, and at::set_num_threads.
// Call at::set_num_threads(1) before, otherwise each of the n ranks uses every core.
struct RunThreadsOptions {
  std::optional<Milliseconds> timeout{};  // as in InitOptions
  std::string backend{};                  // as in InitOptions
};
void run_threads(int n, const std::function<void(int rank)>& fn, RunThreadsOptions options = {});

}  // namespace lockstep
