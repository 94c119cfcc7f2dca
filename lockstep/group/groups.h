// Sub-groups: groups of some ranks of a world (world.h), beside its root group. A sub-group belongs to the
// world it was created in and has its own part of the store, its own timeout and its own sequence of
// operations; operations of different groups never wait for each other. "The world" is the default one,
// unless a parent or group is given: then it is that group's.
//
// Who must call: unless stated otherwise every rank of the world makes the same calls of this file in the
// same order, also for groups it is not a member of; only members wait, and only for members. Non-members get
// a handle whose rank() and size() are -1; collectives on it warn and do nothing.
// Thread safety: every function may be called from any thread, but calls of one rank that create or shrink
// groups must not overlap; lookups and abort_process_group may run at any time.
// Names: groups are numbered, the default group is "0", the next "1"; in a world that create_group made,
// "<its name>/1". Groups that only their members know of (use_local_synchronization, split_group) are named
// by the SHA-1 of their ranks and of the number of earlier groups of the same ranks. Unique in a world.
// Errors: kUsage for bad arguments, before anything is sent and without using up a number; kPeerLost naming
// the rank when a member could not join, kTimeout naming the ranks that did not arrive. A group that failed
// to form does not exist; the other groups stay usable.
#pragma once

#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {

struct NewGroupOptions {
  std::optional<Milliseconds> timeout{};  // of its operations and of joining; unset: the parent's
  Group parent{};                         // what it is a sub-group of; null: the default group
  std::string backend{};  // as in InitOptions; "": host, or hierarchical when its hosts differ
  bool use_local_synchronization = false;  // only members call
  std::string desc{};                      // ProcessGroup::desc()
  std::string name{};                      // "": numbered, or hashed; a name in use raises kUsage
  std::source_location where = std::source_location::current();
};
// A group of `ranks` of the parent, whose members all call. They are sorted: a member's rank in the group is
// its position among them. Raises kUsage when the list is empty, contains duplicates, or contains ranks that
// are not in the parent. With use_local_synchronization only the members call; overlapping groups must then
// be created in the same order on all ranks, otherwise they deadlock.
Group new_group(std::vector<int> ranks, NewGroupOptions options = {});
// A group of all ranks of the parent.
Group new_group(NewGroupOptions options = {});

struct Subgroups {
  Group mine;              // the one this rank is a member of, else the non-member handle
  std::vector<Group> all;  // in order; non-member handles where this rank is not a member
};
struct SubgroupsOptions {
  Group group{};  // new_subgroups: the group to divide; null: the world. If given, only its members call
  std::optional<Milliseconds> timeout{};
  std::string backend{};
  std::string desc{};
  std::source_location where = std::source_location::current();
};
// Divides a group into sub-groups of `group_size` consecutive ranks each. Unset: LOCAL_WORLD_SIZE, one
// sub-group per host. Raises kUsage when the size is not positive, larger than the group or does not divide
// it, or is not known.
Subgroups new_subgroups(std::optional<int> group_size = {}, SubgroupsOptions options = {});
// One group per list of ranks of the world. Ranks may be left out; kUsage when two lists overlap, when a list
// is empty or when no list is given. options.group: null, or the root group of another world.
Subgroups new_subgroups_by_enumeration(std::vector<std::vector<int>> ranks_per_subgroup,
                                       SubgroupsOptions options = {});

struct SplitGroupOptions {
  std::optional<Milliseconds> timeout{};  // unset: the parent's
  std::string desc{};  // empty: "<parent's>:split:<number of the first list with this rank>"
  std::source_location where = std::source_location::current();
};
// Divides a group: called by all members of `parent` (null: the world), each list holds ranks of the parent.
// A rank that is in no list gets the non-member handle (torch: none). The back ends are the parent's. Raises
// kUsage for an empty, repeating, overlapping or out-of-range list, and for a parent that this rank is not a
// member of.
Group split_group(const Group& parent, std::vector<std::vector<int>> split_ranks,
                  SplitGroupOptions options = {});

struct ShrinkGroupOptions {
  Group group{};                          // null: the world
  bool abort = false;                     // abort the operations of the group first
  std::optional<Milliseconds> timeout{};  // of the new group and of joining; unset: the old one's
  std::source_location where = std::source_location::current();
};
// A new group without some of the old one's ranks, for continuing after a loss: called by the survivors only,
// works when the old group is broken. The old group is destroyed. Shrinking a world's root also destroys
// every other group of that world and numbers the survivors from 0; group numbering then starts again. Raises
// kUsage when the list is empty, contains duplicates, is out of range, names this rank or names all ranks.
Group shrink_group(std::vector<int> ranks_to_exclude, ShrinkGroupOptions options = {});

// The handle that a rank gets for a group it is not a member of; the same value for all such groups.
Group non_member_group();
// False for that value. Null is the default group, hence true.
bool is_group_member(const Group& group) noexcept;
// The group of that name in any world of this process (rank thread). Raises kUsage when there is none, and
// when there are two: one of create_group and one that new_group was given the same name for.
Group get_group_by_name(const std::string& name);

// Rank in `group` of a rank of the world, and back. Identity for the default group. Raise kUsage when the
// rank is not a member, for a non-member's handle and for a group that was destroyed.
int get_group_rank(const Group& group, int global_rank);
int get_global_rank(const Group& group, int group_rank);

// Breaks a group on every rank and leaves it, immediately and without waiting for the others: for recovery
// from a fault. A world's root group (null: the default group): all groups of that world, which may then be
// entered again. A non-member's handle: no effect. Raises kUsage for a group that is in none of this
// process's worlds.
void abort_process_group(const Group& group = {},
                         const std::string& reason = "abort_process_group was called");

}  // namespace lockstep
