#include "lockstep/group/internal/world_state.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/detail/sha1.h"
#include "lockstep/group/groups.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/store/store_collectives.h"

namespace lockstep::internal {
namespace {

// Groups are numbered from 0, by the key under which their world knows them; the root comes first.
constexpr const char* kRootKey = "0";

// Numbers by value, then other names by text.
bool name_before(const std::string& a, const std::string& b) {
  const auto is_number = [](const std::string& text) {
    return text.find_first_not_of("0123456789") == std::string::npos;
  };
  const bool number_a = is_number(a), number_b = is_number(b);
  if (number_a != number_b) return number_a;
  if (number_a && a.size() != b.size()) return a.size() < b.size();
  return a < b;
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Why a rank that leaves now does so: the loss that broke the root group, which every rank of the world is a
// member of. Ranks that wait for this one in another group would otherwise learn only that it left. "" when
// there was none.
std::string loss_behind(const Group& world) {
  const auto* base = dynamic_cast<const GroupBase*>(world.get());
  const auto comm =
      base != nullptr && base->engine() != nullptr ? base->communicator(*base->engine()) : nullptr;
  const auto failure = comm ? comm->broken() : std::nullopt;
  if (!failure || failure->kind != ErrorKind::kPeerLost || !failure->peer) return "";
  const auto& [rank, pid, cause] = *failure->peer;
  return base::cat("it lost ", rank ? base::cat("rank ", *rank) : "a rank", " of the world",
                   pid ? base::cat(" (pid ", *pid, ")") : "", ": ", cause);
}

// A world's part of its store. A world entered again over the same store must not meet keys of the one
// before, so the store counts how often each rank has entered: alike on all ranks, and whatever other stores
// their processes have seen before. A process that takes a lost rank's place goes on with its count.
std::string next_part(const std::string& name, Store* store, int rank) {
  const std::int64_t entered = store == nullptr ? 1 : store->add(base::cat(name, "/entered/", rank), 1);
  return entered == 1 ? name : base::cat(name, "/#", entered - 1);
}

}  // namespace

World::World(std::string name, std::string part)
    : name_(std::move(name)), part_(std::move(part)), owner_pid_(::getpid()) {}

std::shared_ptr<World> World::join(WorldPlan plan) {
  const bool needs_store =
      std::ranges::any_of(plan.parts, [](const BackendPart& part) { return runs_alone(*part.engine); });
  if (!plan.store && needs_store) plan.store = std::make_shared<HashStore>();
  std::string part;
  {
    std::optional<StoreTimeoutGuard> joining;
    if (plan.store) joining.emplace(*plan.store, within(plan.store->timeout(), plan.deadline));
    part = next_part(plan.name, plan.store.get(), plan.rank);
  }
  // The store counts for each rank; ranks of one world agree when each has entered equally often. If one is
  // ahead, they meet under different keys and time out, with `entered_before` in the message.
  const std::shared_ptr<World> made(new World(plan.name, part));
  made->keep_ = plan.keep;
  made->site_ = make_site({.what = plan.what,
                           .rank = plan.rank,
                           .size = plan.size,
                           .is_default = made->is_default(),
                           .base = plan.store,
                           .prefix = part,
                           .deadline = plan.deadline});
  made->site_.entered_before = part != plan.name;
  if (!plan.launched) std::ranges::fill(made->site_.launch_ranks, -1);
  if (plan.size > 1 && !plan.store)
    base::raise(ErrorKind::kInternal, "rendezvous returned no store for a world of more than one rank");
  made->site_.parts = plan.parts;
  made->site_.device = plan.device;
  made->site_.engine_options = plan.engine_options;
  if (plan.parts.empty() || lacks_host_memory(plan.parts)) {
    choose_by_places(made->site_, plan.timeout, plan.deadline);
    if (!plan.parts.empty()) {
      made->site_.parts = with_host_memory(made->site_.parts, plan.parts);
      made->site_.places.clear();  // sub-groups take these parts as they are
    }
  }
  made->root_ = build_group(made->site_, {.what = plan.what,
                                          .name = made->full_name(kRootKey),
                                          .desc = plan.desc,
                                          .members = Members(all_ranks(plan.size)),
                                          .timeout = plan.timeout,
                                          .deadline = plan.deadline,
                                          .parts = made->site_.parts,
                                          .folder = "",
                                          .parent = nullptr});
  made->groups_.emplace(kRootKey, made->root_);
  return made;
}

// Groups of the default world are "1", "2" or the name given to new_group, those of another "its name/1".
// Unique in each world, and among all worlds of a process but for one case: create_group and a new_group of
// the default world were given the same name. Ranks that are in one of the two only cannot know of the other,
// so it cannot be refused. Names are for people and for get_group_by_name, which refuses to choose; keys in a
// store are under the world's name and the group's folder.
std::string World::full_name(const std::string& key) const {
  if (is_default()) return key;
  return key == kRootKey ? name_ : base::cat(name_, "/", key);
}

// mutex_ held. Nothing is counted when it raises.
World::Names World::take_name(const GroupPlan& plan) {
  Names names{.key = plan.name, .folder = {}};
  std::string key;  // of what is counted apart from the numbers
  if (plan.hashed) {
    // Only members count it, so other ranks may have counted other groups of that name.
    for (const int rank : plan.members.ranks()) key += base::cat(rank, "_");
  }
  if (!plan.name.empty()) {
    key += "=" + plan.name;
    names.folder = base::cat(key, "#", n_made_[key]);  // a name may come again after its group has gone
  } else if (plan.hashed) {
    names.key = names.folder = sha1(base::cat(key, n_made_[key]));
  } else {
    names.key = names.folder = std::to_string(n_counted_);
  }
  if (groups_.contains(names.key)) {
    base::raise(ErrorKind::kUsage,
                base::cat(plan.what, ": there is a group named \"", full_name(names.key), "\" already"));
  }
  if (!key.empty()) ++n_made_[key];
  if (!plan.hashed) ++n_counted_;
  return names;
}

Group World::make(const GroupPlan& plan) {
  const bool is_member = plan.members.index_of(site_.rank) >= 0;
  if (plan.hashed && !is_member) return non_member_group();
  Names names;
  {
    const std::lock_guard lock(mutex_);
    names = take_name(plan);
  }
  if (!is_member) return non_member_group();
  auto group = build_group(site_, {.what = plan.what,
                                   .name = full_name(names.key),
                                   .desc = plan.desc.empty() ? "undefined" : plan.desc,
                                   .members = plan.members,
                                   .timeout = plan.timeout,
                                   .deadline = Deadline::after(plan.timeout),
                                   .parts = plan.parts,
                                   .folder = names.folder,
                                   .parent = plan.build_on_world ? root_ : nullptr});
  {
    const std::lock_guard lock(mutex_);
    // Joining took place without the lock; meanwhile another thread may have left the world.
    if (!left_ && groups_.emplace(names.key, group).second) return group;
  }
  close_group(*group, "");
  base::raise(ErrorKind::kAborted, base::cat(plan.what, ": the world was left by another thread meanwhile"));
}

// Collective over the ranks that stay, without the old group, which may be broken: everything meets anew in
// the store, under a part that depends on who is excluded and how often it was tried.
std::shared_ptr<World> World::shrink(const std::vector<int>& excluded, Milliseconds timeout) {
  std::vector<int> remaining;
  std::string text;
  for (const int rank : excluded) text += base::cat(rank, "_");
  for (int rank = 0; rank < site_.size; ++rank) {
    if (std::ranges::count(excluded, rank) == 0) remaining.push_back(rank);
  }
  int n_tried = 0;
  {
    const std::lock_guard lock(mutex_);
    n_tried = n_shrinks_++;
  }
  const int size = static_cast<int>(remaining.size());
  const auto deadline = Deadline::after(timeout);
  // Excluded ranks may be alive and enter again: they must not meet the survivors.
  const std::shared_ptr<World> made(new World(name_, base::cat(part_, "/-", n_tried, "-", sha1(text))));
  made->keep_ = keep_;
  made->site_ = make_site({.what = "shrink_group",
                           .rank = Members(remaining).index_of(site_.rank),
                           .size = size,
                           .is_default = is_default(),
                           .base = site_.base,
                           .prefix = made->part_,
                           .deadline = deadline});
  for (int i = 0; i < size; ++i) {
    const auto before = static_cast<std::size_t>(remaining[static_cast<std::size_t>(i)]);
    made->site_.launch_ranks[static_cast<std::size_t>(i)] = site_.launch_ranks[before];
    if (!site_.places.empty()) made->site_.places.push_back(site_.places[before]);
  }
  made->site_.parts = site_.parts;
  made->site_.device = site_.device;
  made->site_.engine_options = site_.engine_options;
  made->root_ = build_group(made->site_, {.what = "shrink_group",
                                          .name = full_name(kRootKey),
                                          .desc = root_->desc(),
                                          .members = Members(all_ranks(size)),
                                          .timeout = timeout,
                                          .deadline = deadline,
                                          .parts = site_.places.empty() ? site_.parts : BackendParts{},
                                          .folder = "",
                                          .parent = nullptr});
  made->groups_.emplace(kRootKey, made->root_);
  return made;
}

bool World::remove(const Group& group) {
  const std::lock_guard lock(mutex_);
  return std::erase_if(groups_, [&](const auto& entry) { return entry.second == group; }) != 0;
}

// A group for which it fails must not keep the others from it.
void World::for_all(const std::function<void(ProcessGroup&)>& fn) const {
  std::vector<std::pair<std::string, Group>> groups;
  {
    const std::lock_guard lock(mutex_);
    groups.assign(groups_.begin(), groups_.end());
  }
  // The root last, numbered groups from the latest on: groups were built on earlier ones.
  std::ranges::sort(groups, [](const auto& a, const auto& b) { return name_before(b.first, a.first); });
  for (const auto& [key, group] : groups) {
    try {
      fn(*group);
    } catch (...) {
      base::log(LogLevel::kError,
                base::cat("leaving group \"", group->name(), "\" failed: ", base::current_failure().message));
    }
  }
}

void World::leave(const std::string& cause) {
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
  }
  const std::string why = cause.empty() ? loss_behind(root_) : cause;
  for_all([&](ProcessGroup& group) { close_group(group, why); });
}

void World::abort(const std::string& reason) const {
  for_all([&](ProcessGroup& group) { group.abort(reason); });
}

Group World::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, group] : groups_) {
    if (group->name() == name) return group;
  }
  return nullptr;
}

bool World::contains(const Group& group) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(groups_, [&](const auto& entry) { return entry.second == group; });
}

void World::raise_timeouts(Milliseconds timeout) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, group] : groups_) group->set_timeout(std::max(timeout, group->timeout()));
}

int World::n_counted() const {
  const std::lock_guard lock(mutex_);
  return n_counted_;
}

bool World::is_of_this_process() const {
  return owner_pid_ == ::getpid();
}

}  // namespace lockstep::internal
