// Sub-groups: groups of some ranks of a world (world.h), beside its root group. A sub-group belongs to the world it was made
// in, has its own part of the store, its own timeout and its own sequence of operations; operations of different groups never
// wait for each other. "The world" is the default one, unless a parent or group is given: then that group's.
//
// Who must call: unless said otherwise every rank of the world makes the same calls of this file in the same order, also
// for groups it is no member of; only members wait, and only for members. Calls of one rank must not overlap.
// Non-members get a handle whose rank() and size() are -1; collectives on it warn and do nothing.
// Names: groups are numbered, the default group is "0", the next "1"; in a world that create_group made, "<its name>/1". Groups that only their members know of
// (use_local_synchronization, split_group) are named by the SHA-1 of their ranks and of how many such groups of the
// same ranks came before.
// Errors: kUsage for bad arguments, before anything is sent and without using up a number; kPeerLost naming the rank
// when a member could not join, kTimeout naming who did not come. A group that failed to form does not exist; the
// others go on.
#pragma once

#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {

struct NewGroupOptions {
  std::optional<Milliseconds> timeout{};  // of its operations and of the joining; unset: the parent's
  Group parent{};                         // what it is a sub-group of; null: the default group
  std::string backend{};  // as in InitOptions; "": host, or hierarchical when its hosts differ
  bool use_local_synchronization = false;  // only members call
  std::string desc{};                      // ProcessGroup::desc()
  std::string name{};                      // "": numbered, or hashed; a name in use raises kUsage
  std::source_location where = std::source_location::current();
};
// A group of `ranks` of the parent, whose members all call. They are sorted: a member's rank in the group is its place among
// them. Raises kUsage when they are none, repeat, or are not ranks of the parent. With use_local_synchronization only the
// members call; groups that overlap must then be made in one order on all ranks, or they wait for each other.
Group new_group(std::vector<int> ranks, NewGroupOptions options = {});
// A group of all ranks of the parent.
Group new_group(NewGroupOptions options = {});

struct Subgroups {
  Group mine;              // the one this rank is a member of, else the non-member handle
  std::vector<Group> all;  // in order; non-member handles where this rank is none
};
struct SubgroupsOptions {
  Group group{};  // new_subgroups: what is divided; null: the world. Else only its members call
  std::optional<Milliseconds> timeout{};
  std::string backend{};
  std::string desc{};
  std::source_location where = std::source_location::current();
};
// Divides a group into sub-groups of `group_size` consecutive ranks each. Negative: LOCAL_WORLD_SIZE, one sub-group per
// host. Raises kUsage when the size is not positive, larger than the group or does not divide it, or is not known.
Subgroups new_subgroups(int group_size = -1, SubgroupsOptions options = {});
// One group per list of ranks of the world. Ranks may be left out; kUsage when two lists overlap, when a list is empty
// or when there is none. options.group: null, or the root group of another world.
Subgroups new_subgroups_by_enumeration(std::vector<std::vector<int>> ranks_per_subgroup,
                                       SubgroupsOptions options = {});

struct SplitGroupOptions {
  std::optional<Milliseconds> timeout{};  // unset: the parent's
  std::string desc{};  // empty: "<parent's>:split:<number of the first list with this rank>"
  std::source_location where = std::source_location::current();
};
// Divides a group: called by all members of `parent` (null: the world), each list holds ranks of the parent. A rank that
// is in no list gets the non-member handle (torch: none). The back ends are the parent's. Raises kUsage for an empty,
// repeating, overlapping or out-of-range list, and for a parent this rank is no member of.
Group split_group(const Group& parent, std::vector<std::vector<int>> split_ranks,
                  SplitGroupOptions options = {});

struct ShrinkGroupOptions {
  Group group{};                          // null: the world
  bool abort = false;                     // end what the group is doing first
  std::optional<Milliseconds> timeout{};  // of the new group and of the joining; unset: the old one's
  std::source_location where = std::source_location::current();
};
// A new group without some of the old one's ranks, for going on after a loss: called by the survivors only, works when
// the old group is broken. The old group is destroyed. Shrinking a world's root destroys every other group of it, too, and numbers
// the survivors from 0; groups are then numbered afresh. Raises kUsage when the list is empty, repeats, is out of
// range, names this rank or names everyone.
Group shrink_group(std::vector<int> ranks_to_exclude, ShrinkGroupOptions options = {});

// What a rank gets for a group it is no member of; one value for all such groups.
Group non_member_group();
// False for that value. Null is the default group, hence true.
bool is_group_member(const Group& group) noexcept;
// The group of that name in any world of this process (rank thread); raises kUsage when there is none.
Group get_group_by_name(const std::string& name);

// Rank in `group` of a rank of the world, and back. Identity for the default group. Raise kUsage when it is no member,
// for a non-member's handle and for a group that was destroyed.
int get_group_rank(const Group& group, int global_rank);
int get_global_rank(const Group& group, int group_rank);

// Breaks a group on every rank and leaves it, at once and without the others: for recovery from a fault. A world's root
// group (null: the default group): all groups of that world, which may then be entered again. A non-member's handle: nothing.
// Raises kUsage for a group that is in none of this process's worlds.
void abort_process_group(const Group& group = {},
                         const std::string& reason = "abort_process_group was called");

}  // namespace lockstep
