#include "lockstep/group/groups.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/debug/detail/rank_list.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/group/detail/call_report.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/internal/worlds.h"

namespace lockstep {
namespace {

using internal::current_worlds;
using internal::list_ranks;
using internal::Members;
using internal::World;

// One call of this file: its name and its caller's line, for messages.
struct GroupCall {
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

  // The world of `group`, or the default one; its members only.
  std::shared_ptr<World> world_of(const Group& group) const {
    if (!is_group_member(group)) refuse("this rank is not a member of the group");
    return current_worlds().of(group, what);
  }

  Milliseconds timeout(const std::optional<Milliseconds>& given, const ProcessGroup& otherwise) const {
    if (given && *given <= Milliseconds::zero())
      refuse("timeout is ", given->count(), " ms; it must be positive");
    return given.value_or(otherwise.timeout());
  }

  // Ascending; each a rank of a group of `size`, `whose` as text. Sorted, as torch does: the order in which a
  // rank lists the members makes no difference.
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

// Which group the ranks of a call belong to.
struct Whole {
  Whole(const GroupCall& call, const Group& given)
      : world(call.world_of(given)), group(given ? given : world->root()) {}

  // This decides how a group gets its key in the store. Numbers work when all ranks of the world count the
  // same calls; where only some know of a group, its key is a hash of its members and of how often they made
  // one (World::take_name).
  // All ranks of the world call; otherwise only the group's members know of what is made of it.
  bool is_root() const { return group == world->root(); }
  const char* text() const { return is_root() ? "the world" : "the parent"; }
  // Ranks of the world of ranks of the group, ascending.
  std::vector<int> in_world(const std::vector<int>& ranks) const {
    std::vector<int> translated;
    for (const int rank : ranks) translated.push_back(group->ranks()[static_cast<std::size_t>(rank)]);
    return translated;
  }

  std::shared_ptr<World> world;
  Group group;
};

// `ranks` are ranks of the world.
Group make(const GroupCall& call, const Whole& whole, std::vector<int> ranks,
           const NewGroupOptions& options) {
  if (!options.name.empty()) {
    if (const auto why = internal::wrong_name(options.name); !why.empty()) call.refuse(why);
  }
  Members members(std::move(ranks));
  const int rank = whole.world->rank();
  if (options.use_local_synchronization && members.index_of(rank) < 0) {
    call.refuse("with use_local_synchronization only members call; this is rank ", rank, ", the members are ",
                list_ranks(members.ranks()));
  }
  return whole.world->make(
      {.what = call.what,
       .members = std::move(members),
       .timeout = call.timeout(options.timeout, *whole.group),
       .parts = options.backend.empty() ? internal::BackendParts{} : internal::parse_backend(options.backend),
       .desc = options.desc,
       .name = options.name,
       .hashed = options.use_local_synchronization || !whole.is_root()});
}

// The lists hold ranks of the world, ascending. Every rank makes every group, also those it is not in: that
// keeps the numbers equal.
Subgroups make_all(const GroupCall& call, const Whole& whole, const std::vector<std::vector<int>>& lists,
                   const SubgroupsOptions& options) {
  Subgroups made{.mine = non_member_group(), .all = {}};
  for (const auto& list : lists) {
    made.all.push_back(make(call, whole, list,
                            {.timeout = options.timeout,
                             .backend = options.backend,
                             .desc = options.desc,
                             .where = options.where}));
    if (std::ranges::binary_search(list, whole.world->rank())) made.mine = made.all.back();
  }
  return made;
}

// No rank is in two lists.
void check_apart(const GroupCall& call, const std::vector<std::vector<int>>& lists) {
  if (lists.empty()) call.refuse("no list of ranks is given");
  std::set<int> seen;
  for (const auto& list : lists) {
    for (const int rank : list) {
      if (!seen.insert(rank).second) call.refuse("rank ", rank, " is in two lists");
    }
  }
}

// As torch: the ranks of one host, when the launcher says how many there are.
int size_of_subgroups(const GroupCall& call, std::optional<int> given, int size) {
  if (!given) {
    const auto local = base::environment_int(base::EnvVar::kLocalWorldSize);
    if (!local)
      call.refuse("no group_size is given and ", name_of(base::EnvVar::kLocalWorldSize), " is not set");
    given = static_cast<int>(*local);
  }
  const int group_size = *given;
  if (group_size <= 0) call.refuse("group_size is ", group_size, "; it must be positive");
  if (group_size > size) call.refuse("group_size is ", group_size, ", the group has only ", size, " ranks");
  if (size % group_size != 0) {
    call.refuse("group_size ", group_size, " does not divide the group's ", size, " ranks");
  }
  return group_size;
}

}  // namespace

Group new_group(std::vector<int> ranks, NewGroupOptions options) {
  const GroupCall call{"new_group", options.where};
  return call.timed([&]() -> Group {
    const Whole whole(call, options.parent);
    return make(call, whole, whole.in_world(call.sorted(std::move(ranks), whole.group->size(), whole.text())),
                options);
  });
}

Group new_group(NewGroupOptions options) {
  const GroupCall call{"new_group", options.where};
  return call.timed([&]() -> Group {
    const Whole whole(call, options.parent);
    return make(call, whole, whole.group->ranks(), options);
  });
}

Subgroups new_subgroups(std::optional<int> group_size, SubgroupsOptions options) {
  const GroupCall call{"new_subgroups", options.where};
  return call.timed([&] {
    const Whole whole(call, options.group);
    const int size = size_of_subgroups(call, group_size, whole.group->size());
    const auto& ranks = whole.group->ranks();
    std::vector<std::vector<int>> lists;
    for (auto at = ranks.begin(); at != ranks.end(); at += size) lists.emplace_back(at, at + size);
    return make_all(call, whole, lists, options);
  });
}

Subgroups new_subgroups_by_enumeration(std::vector<std::vector<int>> ranks_per_subgroup,
                                       SubgroupsOptions options) {
  const GroupCall call{"new_subgroups_by_enumeration", options.where};
  return call.timed([&] {
    const Whole whole(call, options.group);
    if (!whole.is_root()) call.refuse("the lists hold ranks of the world; leave out the group");
    for (auto& list : ranks_per_subgroup)
      list = call.sorted(std::move(list), whole.group->size(), "the world");
    check_apart(call, ranks_per_subgroup);
    return make_all(call, whole, ranks_per_subgroup, options);
  });
}

namespace {

Group split(const GroupCall& call, const Group& parent, std::vector<std::vector<int>> split_ranks,
            const SplitGroupOptions& options) {
  const Whole whole(call, parent);
  const ProcessGroup& group = *whole.group;
  for (auto& list : split_ranks) list = call.sorted(std::move(list), group.size(), "the parent");
  check_apart(call, split_ranks);
  const auto timeout = call.timeout(options.timeout, group);
  const auto mine = std::ranges::find_if(
      split_ranks, [&](const auto& list) { return std::ranges::binary_search(list, group.rank()); });
  if (mine == split_ranks.end()) return non_member_group();
  const auto number = mine - split_ranks.begin();
  // Ranks outside the list do nothing: only the members of a part meet, under a key that they compute alike.
  return whole.world->make(
      {.what = call.what,
       .members = Members(whole.in_world(*mine)),
       .timeout = timeout,
       .parts =
           group.size() == 1 ? internal::BackendParts{} : internal::parse_backend(group.backend_config()),
       .desc = options.desc.empty() ? base::cat(group.desc(), ":split:", number) : options.desc,
       .hashed = true});
}

Group shrink(const GroupCall& call, std::vector<int> ranks_to_exclude, const ShrinkGroupOptions& options) {
  const Whole whole(call, options.group);
  ProcessGroup& old = *whole.group;
  const auto excluded = call.sorted(std::move(ranks_to_exclude), old.size(), "the group");
  if (excluded.size() == old.ranks().size()) call.refuse("every rank is excluded");
  if (std::ranges::binary_search(excluded, old.rank())) {
    call.refuse("this rank (", old.rank(), ") is excluded; only those that stay call");
  }
  const auto timeout = call.timeout(options.timeout, old);
  const bool abort_first = options.abort;
  // A world is replaced as a whole; a smaller group only by another group of the same world.
  if (whole.is_root()) return current_worlds().shrink(whole.group, excluded, abort_first, timeout);
  if (abort_first) old.abort("shrink_group was called with the abort flag");
  std::vector<int> remaining;
  for (int rank = 0; rank < old.size(); ++rank) {
    if (!std::ranges::binary_search(excluded, rank)) remaining.push_back(rank);
  }
  auto made = whole.world->make({.what = call.what,
                                 .members = Members(whole.in_world(remaining)),
                                 .timeout = timeout,
                                 .parts = internal::parse_backend(old.backend_config()),
                                 .desc = old.desc(),
                                 .hashed = true,
                                 .build_on_world = false});
  current_worlds().leave(whole.group, "");
  return made;
}

}  // namespace

Group split_group(const Group& parent, std::vector<std::vector<int>> split_ranks, SplitGroupOptions options) {
  const GroupCall call{"split_group", options.where};
  return call.timed([&] { return split(call, parent, std::move(split_ranks), options); });
}

Group shrink_group(std::vector<int> ranks_to_exclude, ShrinkGroupOptions options) {
  const GroupCall call{"shrink_group", options.where};
  return call.timed([&] { return shrink(call, std::move(ranks_to_exclude), options); });
}

Group get_group_by_name(const std::string& name) {
  const auto found = current_worlds().find(name);
  if (found.size() == 1) return found.front();
  if (found.size() > 1) {
    base::raise(ErrorKind::kUsage,
                base::cat("get_group_by_name: two groups are named \"", name,
                          "\", one of create_group and one of the default world; keep their handles, or "
                          "rename one"));
  }
  base::raise(ErrorKind::kUsage,
              base::cat("get_group_by_name: there is no group \"", name, "\" that this rank is a member of"));
}

int get_group_rank(const Group& group, int global_rank) {
  if (!is_group_member(group))
    base::raise(ErrorKind::kUsage, "get_group_rank: this rank is not a member of the group");
  const auto chosen = internal::still_there(group, "get_group_rank");
  const auto& ranks = chosen->ranks();
  const auto found = std::ranges::lower_bound(ranks, global_rank);
  if (found != ranks.end() && *found == global_rank) return static_cast<int>(found - ranks.begin());
  base::raise(ErrorKind::kUsage,
              base::cat("get_group_rank: rank ", global_rank, " of the world is not a member of group \"",
                        chosen->name(), "\", whose ranks are ", list_ranks(ranks)));
}

int get_global_rank(const Group& group, int group_rank) {
  if (!is_group_member(group))
    base::raise(ErrorKind::kUsage, "get_global_rank: this rank is not a member of the group");
  const auto chosen = internal::still_there(group, "get_global_rank");
  const auto& ranks = chosen->ranks();
  if (group_rank >= 0 && group_rank < chosen->size()) return ranks[static_cast<std::size_t>(group_rank)];
  base::raise(ErrorKind::kUsage, base::cat("get_global_rank: group \"", chosen->name(), "\" has no rank ",
                                           group_rank, "; its ranks are 0 to ", chosen->size() - 1));
}

void abort_process_group(const Group& group, const std::string& reason) {
  current_worlds().abort(group, reason);
}

}  // namespace lockstep
