#include "lockstep/group/groups.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/debug/detail/rank_list.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <set>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/group/detail/call_report.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/internal/world_state.h"

namespace lockstep {
namespace {

using internal::current_world;
using internal::list_ranks;
using internal::Members;

// One call of this file: its name and its caller's line, for messages.
struct Call {
  const char* what;
  const std::source_location& where;

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    char text[internal::kWhereCapacity];
    internal::write_where(where, text);
    base::raise(ErrorKind::kUsage, base::cat(what, " (called at ", text, "): ", parts...));
  }

  // Runs the call, for the records of call_log.h.
  template <class Fn>
  auto timed(const Fn& fn) const {
    return internal::timed_call(what, where, nullptr, fn);
  }

  // `group`, or the default one; its members only.
  Group member(const Group& group) const {
    if (!is_group_member(group)) refuse("this rank is no member of the group");
    current_world().require(group, what);
    return group ? group : default_group();
  }

  Milliseconds timeout(const std::optional<Milliseconds>& given, const ProcessGroup& otherwise) const {
    if (given && *given <= Milliseconds::zero())
      refuse("timeout is ", given->count(), " ms; it must be positive");
    return given.value_or(otherwise.timeout());
  }

  // Ascending; each a rank of a group of `size`, `whose` in words.
  std::vector<int> sorted(std::vector<int> ranks, int size, const char* whose) const {
    if (ranks.empty()) refuse("the list of ranks is empty");
    std::ranges::sort(ranks);
    if (const auto twice = std::ranges::adjacent_find(ranks); twice != ranks.end())
      refuse("rank ", *twice, " is in the list twice");
    for (const int rank : {ranks.front(), ranks.back()}) {
      if (rank < 0 || rank >= size)
        refuse("rank ", rank, " is in the list; ranks of ", whose, " are 0 to ", size - 1);
    }
    return ranks;
  }
};

void check_name(const Call& call, const std::string& name) {
  const auto allowed = [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '-' || c == '.' || c == ':';
  };
  const auto digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  if (name.empty()) return;
  if (!std::ranges::all_of(name, allowed) || std::ranges::all_of(name, digit)) {
    call.refuse("group_name is \"", name, "\"; use letters, digits, _ - . and :, not digits alone");
  }
}

Group make(const Call& call, std::vector<int> ranks, const NewGroupOptions& options) {
  check_name(call, options.group_name);
  const auto world = call.member({});
  Members members(std::move(ranks));
  if (options.use_local_synchronization && members.index_of(world->rank()) < 0) {
    call.refuse("with use_local_synchronization only members call; this is rank ", world->rank(),
                ", the members are ", list_ranks(members.ranks()));
  }
  return current_world().make(
      {.what = call.what,
       .members = std::move(members),
       .timeout = call.timeout(options.timeout, *world),
       .parts = options.backend.empty() ? internal::BackendParts{} : internal::parse_backend(options.backend),
       .desc = options.group_desc,
       .name = options.group_name,
       .hashed = options.use_local_synchronization});
}

Subgroups make_all(const Call& call, const std::vector<std::vector<int>>& lists,
                   const SubgroupsOptions& options, bool only_members_call) {
  Subgroups made{.mine = non_member_group(), .all = {}};
  const int rank = default_group()->rank();
  for (const auto& list : lists) {
    const bool mine = std::ranges::binary_search(list, rank);
    if (!mine && only_members_call) {
      made.all.push_back(non_member_group());
      continue;
    }
    made.all.push_back(make(call, list,
                            {.timeout = options.timeout,
                             .backend = options.backend,
                             .use_local_synchronization = only_members_call,
                             .group_desc = options.group_desc,
                             .where = options.where}));
    if (mine) made.mine = made.all.back();
  }
  return made;
}

// No rank is in two lists.
void check_apart(const Call& call, const std::vector<std::vector<int>>& lists) {
  if (lists.empty()) call.refuse("no list of ranks is given");
  std::set<int> seen;
  for (const auto& list : lists) {
    for (const int rank : list) {
      if (!seen.insert(rank).second) call.refuse("rank ", rank, " is in two lists");
    }
  }
}

int size_of_subgroups(const Call& call, int group_size, int size) {
  if (group_size < 0) {
    const auto local = base::environment_int(base::EnvVar::kLocalWorldSize);
    if (!local)
      call.refuse("no group_size is given and ", name_of(base::EnvVar::kLocalWorldSize), " is not set");
    group_size = static_cast<int>(*local);
  }
  if (group_size <= 0) call.refuse("group_size is ", group_size, "; it must be positive");
  if (group_size > size) call.refuse("group_size is ", group_size, ", the group has only ", size, " ranks");
  if (size % group_size != 0) {
    call.refuse("group_size ", group_size, " does not divide the group's ", size, " ranks");
  }
  return group_size;
}

}  // namespace

Group new_group(std::vector<int> ranks, NewGroupOptions options) {
  const Call call{"new_group", options.where};
  return call.timed([&]() -> Group {
    const auto world = call.member({});
    return make(call, call.sorted(std::move(ranks), world->size(), "the world"), options);
  });
}

Group new_group(NewGroupOptions options) {
  const Call call{"new_group", options.where};
  return call.timed([&]() -> Group { return make(call, call.member({})->ranks(), options); });
}

Subgroups new_subgroups(int group_size, SubgroupsOptions options) {
  const Call call{"new_subgroups", options.where};
  return call.timed([&] {
    const auto whole = call.member(options.group);
    const int size = size_of_subgroups(call, group_size, whole->size());
    std::vector<std::vector<int>> lists;
    for (auto at = whole->ranks().begin(); at != whole->ranks().end(); at += size)
      lists.emplace_back(at, at + size);
    return make_all(call, lists, options, whole != default_group());
  });
}

Subgroups new_subgroups_by_enumeration(std::vector<std::vector<int>> ranks_per_subgroup,
                                       SubgroupsOptions options) {
  const Call call{"new_subgroups_by_enumeration", options.where};
  return call.timed([&] {
    if (options.group) call.refuse("the lists hold ranks of the world; leave out the group");
    const auto world = call.member({});
    for (auto& list : ranks_per_subgroup) list = call.sorted(std::move(list), world->size(), "the world");
    check_apart(call, ranks_per_subgroup);
    return make_all(call, ranks_per_subgroup, options, false);
  });
}

namespace {

Group split(const Call& call, const Group& parent, std::vector<std::vector<int>> split_ranks,
            const SplitGroupOptions& options) {
  const auto whole = call.member(parent);
  for (auto& list : split_ranks) list = call.sorted(std::move(list), whole->size(), "the parent");
  check_apart(call, split_ranks);
  const auto timeout = call.timeout(options.timeout, *whole);
  const auto mine = std::ranges::find_if(
      split_ranks, [&](const auto& list) { return std::ranges::binary_search(list, whole->rank()); });
  if (mine == split_ranks.end()) return non_member_group();
  std::vector<int> ranks;
  for (const int rank : *mine) ranks.push_back(whole->ranks()[static_cast<std::size_t>(rank)]);
  const auto number = mine - split_ranks.begin();
  const bool alone = whole->size() == 1;
  return current_world().make(
      {.what = call.what,
       .members = Members(std::move(ranks)),
       .timeout = timeout,
       .parts = alone ? internal::BackendParts{} : internal::parse_backend(whole->backend_config()),
       .desc = options.group_desc.empty() ? base::cat(whole->desc(), ":split:", number) : options.group_desc,
       .hashed = true});
}

Group shrink(const Call& call, std::vector<int> ranks_to_exclude, const ShrinkGroupOptions& options) {
  const auto old = call.member(options.group);
  const auto excluded = call.sorted(std::move(ranks_to_exclude), old->size(), "the group");
  if (excluded.size() == old->ranks().size()) call.refuse("every rank is excluded");
  if (std::ranges::binary_search(excluded, old->rank())) {
    call.refuse("this rank (", old->rank(), ") is excluded; only those that stay call");
  }
  const auto timeout = call.timeout(options.timeout, *old);
  const bool abort_first = options.flags == ShrinkFlags::kAbort;
  if (old == default_group()) return current_world().shrink(excluded, abort_first, timeout);
  if (abort_first) old->abort("shrink_group was called with the abort flag");
  std::vector<int> left;
  for (int rank = 0; rank < old->size(); ++rank) {
    if (!std::ranges::binary_search(excluded, rank))
      left.push_back(old->ranks()[static_cast<std::size_t>(rank)]);
  }
  auto made = current_world().make({.what = call.what,
                                    .members = Members(std::move(left)),
                                    .timeout = timeout,
                                    .parts = internal::parse_backend(old->backend_config()),
                                    .desc = old->desc(),
                                    .hashed = true,
                                    .build_on_world = false});
  current_world().leave(old, "");
  return made;
}

}  // namespace

Group split_group(const Group& parent, std::vector<std::vector<int>> split_ranks, SplitGroupOptions options) {
  const Call call{"split_group", options.where};
  return call.timed([&] { return split(call, parent, std::move(split_ranks), options); });
}

Group shrink_group(std::vector<int> ranks_to_exclude, ShrinkGroupOptions options) {
  const Call call{"shrink_group", options.where};
  return call.timed([&] { return shrink(call, std::move(ranks_to_exclude), options); });
}

Group get_group_by_name(const std::string& name) {
  if (auto group = current_world().find(name)) return group;
  base::raise(ErrorKind::kUsage,
              base::cat("get_group_by_name: there is no group \"", name, "\" that this rank is a member of"));
}

int get_group_rank(const Group& group, int global_rank) {
  if (!is_group_member(group))
    base::raise(ErrorKind::kUsage, "get_group_rank: this rank is no member of the group");
  const auto chosen = internal::still_there(group, "get_group_rank");
  const auto& ranks = chosen->ranks();
  const auto found = std::ranges::lower_bound(ranks, global_rank);
  if (found != ranks.end() && *found == global_rank) return static_cast<int>(found - ranks.begin());
  base::raise(ErrorKind::kUsage,
              base::cat("get_group_rank: rank ", global_rank, " of the world is no member of group \"",
                        chosen->name(), "\", whose ranks are ", list_ranks(ranks)));
}

int get_global_rank(const Group& group, int group_rank) {
  if (!is_group_member(group))
    base::raise(ErrorKind::kUsage, "get_global_rank: this rank is no member of the group");
  const auto chosen = internal::still_there(group, "get_global_rank");
  const auto& ranks = chosen->ranks();
  if (group_rank >= 0 && group_rank < chosen->size()) return ranks[static_cast<std::size_t>(group_rank)];
  base::raise(ErrorKind::kUsage, base::cat("get_global_rank: group \"", chosen->name(), "\" has no rank ",
                                           group_rank, "; its ranks are 0 to ", chosen->size() - 1));
}

void abort_process_group(const Group& group, const std::string& reason) {
  current_world().abort(group, reason);
}

}  // namespace lockstep
