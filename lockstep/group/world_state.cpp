#include "lockstep/group/internal/world_state.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/internal/copies.h"
#include "lockstep/rendezvous/rendezvous.h"
#include "lockstep/store/hash_store.h"

namespace lockstep::internal {
namespace {

// The part of the store that everything of a world lies in, and the default group's description.
constexpr const char* kDefaultPart = "default_pg";
// Groups are numbered from 0; the default one comes first.
constexpr const char* kDefaultName = "0";

[[noreturn]] void refuse(const InitOptions& options, const std::string& words) {
  char where[kWhereCapacity];
  write_where(options.where, where);
  base::raise(ErrorKind::kUsage, base::cat("init_process_group (called at ", where, "): ", words));
}

void check_options(const InitOptions& options) {
  if (options.store && !options.init_method.empty()) {
    refuse(options, "give init_method or store, not both");
  }
  if (options.store && options.world_size < 1)
    refuse(options, "with a store, world_size must be given and positive");
  if (options.store && options.rank < 0) refuse(options, "with a store, rank must be given and not negative");
  if (options.world_size >= 1 && options.rank >= options.world_size) {
    refuse(options, base::cat("rank is ", options.rank, ", ranks of a world of ", options.world_size,
                              " are 0 to ", options.world_size - 1));
  }
  if (options.timeout && *options.timeout <= Milliseconds::zero()) {
    refuse(options, base::cat("timeout is ", options.timeout->count(), " ms; it must be positive"));
  }
}

// LOCKSTEP_TIMEOUT where the program said nothing.
Milliseconds timeout_of(const InitOptions& options) {
  if (options.timeout) return *options.timeout;
  const auto text = base::environment(base::EnvVar::kLockstepTimeout);
  if (!text) return kDefaultGroupTimeout;
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  if (*end != '\0' || !(seconds > 0) || seconds > 1e9) {
    refuse(options, base::cat(name_of(base::EnvVar::kLockstepTimeout),
                              " must be a positive number of seconds, but is \"", *text, "\""));
  }
  return std::max(Milliseconds(1), Milliseconds(std::llround(seconds * 1000)));
}

RendezvousResult meet(const InitOptions& options, const BackendParts& parts, Milliseconds timeout) {
  const bool no_peers = !parts.empty() && std::ranges::all_of(parts, [](const BackendPart& part) {
    return has_no_peers(*part.engine);
  });
  if (no_peers && !options.store && options.init_method.empty() && options.world_size >= 1) {
    return {.store = std::make_shared<HashStore>(),
            .rank = std::max(options.rank, 0),
            .world_size = options.world_size};
  }
  if (options.store) return {.store = options.store, .rank = options.rank, .world_size = options.world_size};
  return rendezvous({.init_method = options.init_method.empty() ? "env://" : options.init_method,
                     .rank = options.rank,
                     .world_size = options.world_size,
                     .timeout = timeout});
}

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

// Why a rank that leaves now does so: the loss that broke the default group, which every rank of the world is a member
// of. Ranks that wait for this one in another group would otherwise learn only that it left. "" when there was none.
std::string loss_behind(const Group& world) {
  const auto* base = dynamic_cast<const GroupBase*>(world.get());
  const auto comm =
      base != nullptr && base->engine() != nullptr ? base->communicator(*base->engine()) : nullptr;
  const auto failure = comm ? comm->broken() : std::nullopt;
  if (!failure || failure->kind != ErrorKind::kPeerLost || !failure->peer) return "";
  return base::cat("it lost rank ", failure->peer->rank, " of the world (pid ", failure->peer->pid,
                   "): ", failure->peer->cause);
}

}  // namespace

World::~World() {
  // A forked child must not end its parent's groups: the copy it holds is left where it is, for ever.
  if (entered_ && owner_pid_ != ::getpid()) new std::shared_ptr<Entered>(std::move(entered_));
  if (!entered_) return;
  const std::string cause = loss_behind(entered_->group);
  close_all(*entered_, [&](ProcessGroup& group) { close_group(group, cause); });
}

// A group that cannot be left well must not keep the others from it.
void World::close_all(const Entered& entered, const std::function<void(ProcessGroup&)>& close) {
  std::vector<Group> groups;
  for (const auto& [name, group] : entered.groups) groups.push_back(group);
  std::ranges::sort(groups, [](const Group& a, const Group& b) { return name_before(b->name(), a->name()); });
  for (const auto& group : groups) {
    try {
      close(*group);
    } catch (...) {
      base::log(LogLevel::kError,
                base::cat("leaving group \"", group->name(), "\" failed: ", base::current_failure().message));
    }
  }
}

void World::enter(const InitOptions& options) {
  check_options(options);
  const bool of_process = this == &process_world();
  if (const auto other = of_process ? other_copy_in_use() : ""; !other.empty()) {
    refuse(options, base::cat("lockstep is in this process twice, in ", this_copy(), " and in ", other,
                              ", which has initialised its default group already; ", kCopiesAdvice));
  }
  {
    const std::lock_guard lock(mutex_);
    if (entered_) refuse(options, "the default group exists already; call destroy_process_group first");
    if (entering_) refuse(options, "another thread is inside init_process_group");
    entering_ = true;
  }
  std::shared_ptr<Entered> made;
  try {
    made = join(options);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    entering_ = false;
    throw;
  }
  const std::lock_guard lock(mutex_);
  entering_ = false;
  owner_pid_ = ::getpid();
  entered_ = std::move(made);
  if (of_process) note_process_world(true);
}

// The world's part of its store. A world entered again over the same store must not meet keys of the one before, so
// the store counts how often each rank has entered: alike on all ranks, and whatever other stores their processes have
// seen before. A process that takes a lost rank's place goes on with its count.
std::string World::next_part(Store* store, int rank) {
  const std::int64_t entered =
      store == nullptr ? 1 : store->add(base::cat(kDefaultPart, "/entered/", rank), 1);
  return entered == 1 ? kDefaultPart : base::cat(kDefaultPart, "/#", entered - 1);
}

std::shared_ptr<World::Entered> World::join(const InitOptions& options) {
  const Milliseconds timeout = timeout_of(options);
  const auto deadline = Deadline::after(timeout);  // of the meeting and of all that follows
  BackendParts parts;
  if (!options.backend.empty()) parts = parse_backend(options.backend);
  RendezvousResult place = meet(options, parts, timeout);
  base::set_log_rank(place.world_size > 1 ? place.rank : -1);
  const bool needs_store =
      std::ranges::any_of(parts, [](const BackendPart& part) { return runs_alone(*part.engine); });
  if (!place.store && needs_store) place.store = std::make_shared<HashStore>();
  auto made = std::make_shared<Entered>();
  {
    std::optional<StoreTimeoutGuard> joining;
    if (place.store) joining.emplace(*place.store, within(place.store->timeout(), deadline));
    made->part = next_part(place.store.get(), place.rank);
  }
  made->site = make_site(place.rank, place.world_size, place.store, made->part, deadline);
  made->site.entered_before = made->part != kDefaultPart;
  if (place.world_size > 1 && !place.store)
    base::raise(ErrorKind::kInternal, "rendezvous gave no store to a world of more than one");
  made->site.parts = parts;
  if (parts.empty()) choose_by_hosts(made->site, timeout, deadline);
  made->group = join_group(made->site, {.what = "init_process_group",
                                        .name = kDefaultName,
                                        .desc = kDefaultPart,
                                        .members = Members(all_ranks(place.world_size)),
                                        .timeout = timeout,
                                        .deadline = deadline,
                                        .parts = made->site.parts,
                                        .folder = "",
                                        .parent = nullptr});
  made->groups.emplace(kDefaultName, made->group);
  if (place.world_size > 1) {
    base::log(LogLevel::kInfo,
              base::cat("joined a world of ", place.world_size, " as rank ", place.rank, " over ",
                        made->group->backend_config(), ", store ", place.store->describe()));
  }
  return made;
}

std::shared_ptr<World::Entered> World::entered(const char* what) const {
  const std::lock_guard lock(mutex_);
  if (entered_) return entered_;
  base::raise(ErrorKind::kUsage, base::cat(what, ": ", not_initialised()));
}

// mutex_ held. Nothing is counted when it raises.
World::Names World::take_name(Entered& entered, const GroupPlan& plan) {
  Names names{.name = plan.name, .folder = {}};
  std::string key;  // of what is counted apart from the numbers
  if (!plan.name.empty()) {
    key = "=" + plan.name;
    names.folder =
        base::cat(key, "#", entered.n_made[key]);  // a name may come again after its group has gone
  } else if (plan.hashed) {
    for (const int rank : plan.members.ranks()) key += base::cat(rank, "_");
    names.name = names.folder = sha1(base::cat(key, entered.n_made[key]));
  } else {
    names.name = names.folder = std::to_string(entered.n_counted);
  }
  if (entered.groups.contains(names.name)) {
    base::raise(ErrorKind::kUsage,
                base::cat(plan.what, ": there is a group named \"", names.name, "\" already"));
  }
  if (!key.empty()) ++entered.n_made[key];
  if (!plan.hashed) ++entered.n_counted;
  return names;
}

Group World::make(const GroupPlan& plan) {
  const auto world = entered(plan.what);
  Names names;
  {
    const std::lock_guard lock(mutex_);
    names = take_name(*world, plan);
  }
  if (plan.members.index_of(world->site.rank) < 0) return non_member_group();
  auto group = join_group(world->site, {.what = plan.what,
                                        .name = names.name,
                                        .desc = plan.desc.empty() ? "undefined" : plan.desc,
                                        .members = plan.members,
                                        .timeout = plan.timeout,
                                        .deadline = Deadline::after(plan.timeout),
                                        .parts = plan.parts,
                                        .folder = names.folder,
                                        .parent = plan.build_on_world ? world->group : nullptr});
  {
    const std::lock_guard lock(mutex_);
    if (entered_ == world && world->groups.emplace(names.name, group).second) return group;
  }
  close_group(*group, "");
  base::raise(ErrorKind::kAborted, base::cat(plan.what, ": the world was left by another thread meanwhile"));
}

Group World::shrink(const std::vector<int>& excluded, bool abort_first, Milliseconds timeout) {
  const auto old = entered("shrink_group");
  if (abort_first) {
    close_all(*old, [](ProcessGroup& group) { group.abort("shrink_group was called with the abort flag"); });
  }
  std::vector<int> left;
  std::string text;
  for (const int rank : excluded) text += base::cat(rank, "_");
  for (int rank = 0; rank < old->site.size; ++rank) {
    if (std::ranges::count(excluded, rank) == 0) left.push_back(rank);
  }
  const int size = static_cast<int>(left.size());
  const int rank = Members(left).index_of(old->site.rank);
  auto made = std::make_shared<Entered>();
  // Excluded ranks may be alive and enter again: they must not meet the survivors.
  made->part = base::cat(old->part, "/-", old->n_shrinks++, "-", sha1(text));
  made->site = make_site(rank, size, old->site.base, made->part, Deadline::after(timeout));
  for (int i = 0; i < size; ++i) {
    const auto before = static_cast<std::size_t>(left[static_cast<std::size_t>(i)]);
    made->site.launch_ranks[static_cast<std::size_t>(i)] = old->site.launch_ranks[before];
    if (!old->site.hosts.empty()) made->site.hosts.push_back(old->site.hosts[before]);
  }
  made->site.parts = old->site.parts;
  made->group = join_group(made->site, {.what = "shrink_group",
                                        .name = kDefaultName,
                                        .desc = old->group->desc(),
                                        .members = Members(all_ranks(size)),
                                        .timeout = timeout,
                                        .deadline = Deadline::after(timeout),
                                        .parts = made->site.hosts.empty() ? made->site.parts : BackendParts{},
                                        .folder = "",
                                        .parent = nullptr});
  made->groups.emplace(kDefaultName, made->group);
  {
    const std::lock_guard lock(mutex_);
    entered_ = made;
  }
  base::set_log_rank(size > 1 ? rank : -1);
  close_all(*old, [](ProcessGroup& group) { close_group(group, ""); });
  return made->group;
}

// Takes one group, or the whole world, out of the registry. Both null for a non-member's handle.
std::shared_ptr<World::Entered> World::take(const Group& group, const char* what, Group& one) {
  if (!is_group_member(group)) return nullptr;
  const std::lock_guard lock(mutex_);
  if (!entered_) base::raise(ErrorKind::kUsage, base::cat(what, ": ", not_initialised()));
  if (!group || group == entered_->group) {
    if (this == &process_world()) note_process_world(false);
    return std::move(entered_);
  }
  const auto found = entered_->groups.find(group->name());
  if (found == entered_->groups.end() || found->second != group) {
    base::raise(ErrorKind::kUsage,
                base::cat(what, ": group \"", group->name(), "\" is not one of this world's"));
  }
  one = std::move(found->second);
  entered_->groups.erase(found);
  return nullptr;
}

void World::leave(const Group& group, const std::string& cause) {
  Group one;
  const auto all = take(group, "destroy_process_group", one);
  if (one) close_group(*one, cause);
  if (!all) return;
  const std::string why = cause.empty() ? loss_behind(all->group) : cause;
  close_all(*all, [&](ProcessGroup& each) { close_group(each, why); });
  base::set_log_rank(-1);
}

void World::abort(const Group& group, const std::string& reason) {
  Group one;
  const auto all = take(group, "abort_process_group", one);
  if (one) {
    one->abort(reason);
    close_group(*one, "");
  }
  if (!all) return;
  // All are broken before any is left: leaving waits for what is still running.
  close_all(*all, [&](ProcessGroup& each) { each.abort(reason); });
  close_all(*all, [](ProcessGroup& each) { close_group(each, ""); });
  base::set_log_rank(-1);
}

Group World::group() const {
  const std::lock_guard lock(mutex_);
  return entered_ ? entered_->group : nullptr;
}

Group World::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  if (!entered_) return nullptr;
  const auto found = entered_->groups.find(name);
  return found == entered_->groups.end() ? nullptr : found->second;
}

void World::require(const Group& group, const char* what) const {
  if (!group || find(group->name()) == group) return;
  base::raise(ErrorKind::kUsage,
              base::cat(what, ": group \"", group->name(), "\" is not one of this world's"));
}

void World::raise_timeouts(Milliseconds timeout) const {
  const std::lock_guard lock(mutex_);
  if (!entered_) return;
  for (const auto& [name, group] : entered_->groups) group->set_timeout(std::max(timeout, group->timeout()));
}

int World::n_counted() const {
  const std::lock_guard lock(mutex_);
  return entered_ ? entered_->n_counted : 0;
}

World& process_world() {
  static World world;
  return world;
}

World& current_world() {
  const base::RankThread* rank = base::this_rank_thread();
  return rank != nullptr && rank->world != nullptr ? *static_cast<World*>(rank->world) : process_world();
}

std::string not_initialised() {
  std::string text = "the default process group is not initialised; call init_process_group first";
  if (const auto other = other_copy_in_use(); !other.empty()) {
    text += base::cat(". (It was in ", other, ", which holds another copy of lockstep than ", this_copy(),
                      "; ", kCopiesAdvice, ")");
  }
  return text;
}

void raise_world_timeouts(Milliseconds timeout) {
  current_world().raise_timeouts(timeout);
}

std::shared_ptr<RankUse> current_rank_use() {
  return base::this_rank_thread() == nullptr ? nullptr : current_world().rank_use;
}

}  // namespace lockstep::internal
