// Creates and closes groups, for the world above them. For collective/, through group_base.h.
// Thread safety: every function may be called from any thread; GroupShared: as stated at its members.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/engine/engine.h"
#include "lockstep/group/detail/engine_host.h"
#include "lockstep/group/process_group.h"
#include "lockstep/store/store.h"

namespace lockstep::internal {

// Who is in a group. A value; the default is a non-member's handle.
class Members {
 public:
  Members() = default;
  // Ranks of the world, ascending, each once.
  explicit Members(std::vector<int> ranks);

  const std::vector<int>& ranks() const { return ranks_; }
  // Rank in the group of a rank of the world; -1 when it is not a member. Cheap: called for every src and
  // dst.
  int index_of(int world_rank) const noexcept;

 private:
  std::vector<int> ranks_;
  bool identity_ = true;  // ranks_ are 0, 1, 2, ...
};

// What all parts of one group share: one per device, and the debug wrapper around them.
struct GroupShared {
  explicit GroupShared(Milliseconds timeout_ms, std::string description)
      : timeout(timeout_ms), desc(std::move(description)) {}

  // Calls the hook, if there is one. Never throws.
  void completed(const WorkInfo& info) noexcept;

  std::atomic<Milliseconds> timeout;
  std::atomic<std::uint64_t> sequence{0};    // of the last collective, refused ones included
  std::atomic<std::uint64_t> n_messages{0};  // of the last send or receive
  std::atomic<bool> has_refusal{false};      // refusal is set and was not reported yet
  std::atomic<std::uint64_t> n_gathers{0};   // monitored barriers started
  std::atomic<bool> timing{false};
  std::atomic<bool> left{false};      // destroyed or aborted: queries about it are refused
  std::atomic<bool> has_hook{false};  // hook is set, and never changes again
  CompletionHook hook;
  std::mutex mutex;
  std::string desc;                 // guarded by mutex
  std::string refusal;              // guarded by mutex; "gather at train.cpp:42"
  std::map<std::string, int> hits;  // guarded by mutex; of breakpoint(), by the caller's line
};

// A world, as its groups see it. One object per world: groups are of one world when they share it.
struct WorldInfo {
  int rank;  // this rank's in it
  int size;
  bool is_default;  // entered by init_process_group, not by create_group
};

// What is known of a group before it is joined.
struct GroupIdentity {
  std::string name;
  std::shared_ptr<const WorldInfo> world;  // null for a non-member's handle
  int rank;
  Members members;
  std::shared_ptr<Store> store;  // the group's own part; may be null for a group of one
  std::shared_ptr<GroupShared> shared;
  std::vector<std::string> devices;  // the device types that this part of the group serves: "cpu"
};

// A group of one: nothing to send.
Group make_solo_group(GroupIdentity identity);

// How to join a group over an engine.
struct EngineGroupOptions {
  GroupIdentity identity;
  const comm::Engine* engine;
  EngineHost::Stores stores;
  std::shared_ptr<Store> engine_store;  // the engine's part of the group's store, for registered back ends
  std::string
      failed_key;  // in the group's store: a rank that cannot join writes it, and the others stop waiting
  std::vector<int> launch_ranks;  // what the launcher calls the members
  Deadline deadline;              // of the joining
  Group parent;                   // the default group, for an engine that can build on it; null: none
  std::string key;                // of the group among those ever built on the parent
  std::optional<int> device{};    // the GPU that this rank is bound to: the engine may connect at once
  std::string engine_options{};   // lockstep_comm_config.options; "": none
  std::function<void()>
      compare_members;  // in the store, where the engine does not; raises kUsage. Null: nothing to compare
};
// Collective: blocks until all ranks have joined or the timeout passes.
Group make_engine_group(EngineGroupOptions options);

// One group of several parts, each for different device types; identity.devices are all of them.
Group make_multi_group(GroupIdentity identity, std::vector<Group> parts);

// Compares every collective between the ranks before `inner` runs it (internal/checker.h).
class Checker;
Group make_checked_group(GroupIdentity identity, const Group& inner, std::shared_ptr<Checker> checker);

// Leaves, once: waits for operations in flight, then notifies the others. An empty cause is an orderly leave.
void close_group(ProcessGroup& group, const std::string& cause);

// "train.cpp:42", truncated at the front when the path is long. Fits kWhereCapacity including the terminating
// null.
inline constexpr std::size_t kWhereCapacity = 256;
void write_where(const std::source_location& where, char* out);

}  // namespace lockstep::internal
