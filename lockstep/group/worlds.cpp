#include "lockstep/group/internal/worlds.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>

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
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::internal {
namespace {

const char* name_of_call(const InitOptions&) {
  return "init_process_group";
}
const char* name_of_call(const CreateGroupOptions&) {
  return "create_group";
}

// Both kinds of options know their call and its line.
template <class Options>
[[noreturn]] void refuse(const Options& options, const std::string& text) {
  char where[kWhereCapacity];
  write_where(options.where, where);
  base::raise(ErrorKind::kUsage, base::cat(name_of_call(options), " (called at ", where, "): ", text));
}

template <class Options>
void check_timeout(const Options& options) {
  if (options.timeout && *options.timeout <= Milliseconds::zero()) {
    refuse(options, base::cat("timeout is ", options.timeout->count(), " ms; it must be positive"));
  }
}

// The index of device_id on a GPU; unset for the CPU, and where none is given.
template <class Options>
std::optional<int> gpu_of(const Options& options) {
  if (!options.device_id || options.device_id->is_cpu()) return std::nullopt;
  const at::Device device = *options.device_id;
  const int n = device_count(device.type());
  if (!device.is_cuda() || !device.has_index() || device.index() >= n) {
    refuse(options, base::cat("device_id is ", device.str(), "; this process sees ", n, " ",
                              c10::DeviceTypeName(device.type(), true),
                              " devices. Give one of them with its index, as in \"cuda:0\""));
  }
  return device.index();
}

void check_options(const InitOptions& options) {
  if (options.store && !options.init_method.empty()) {
    refuse(options, "give init_method or store, not both");
  }
  if (options.store && !options.world_size) refuse(options, "with a store, world_size must be given");
  if (options.world_size && *options.world_size < 1)
    refuse(options, base::cat("world_size is ", *options.world_size, "; it must be positive"));
  if (options.store && !options.rank) refuse(options, "with a store, rank must be given");
  if (options.rank && *options.rank < 0)
    refuse(options, base::cat("rank is ", *options.rank, "; it must not be negative"));
  if (options.world_size && options.rank && *options.rank >= *options.world_size) {
    refuse(options, base::cat("rank is ", *options.rank, ", ranks of a world of ", *options.world_size,
                              " are 0 to ", *options.world_size - 1));
  }
  check_timeout(options);
}

void check_options(const CreateGroupOptions& options) {
  if (!options.store) refuse(options, "a store is needed, where the ranks of the group meet");
  if (!options.size || *options.size < 1) refuse(options, "size must be given and positive");
  if (!options.rank || *options.rank < 0) refuse(options, "rank must be given and not negative");
  if (*options.rank >= *options.size) {
    refuse(options, base::cat("rank is ", *options.rank, ", ranks of a group of ", *options.size,
                              " are 0 to ", *options.size - 1));
  }
  if (options.name.empty())
    refuse(options, "a name is needed: the ranks of the group meet under it in the store");
  if (const auto why = wrong_name(options.name); !why.empty()) refuse(options, why);
  if (options.name == kDefaultWorld)
    refuse(options, base::cat("\"", kDefaultWorld, "\" is the default world's name"));
  check_timeout(options);
}

// The ranks are those that the launcher started: what it says about the end of rank i is about rank i of the
// group. Each rank decides by its own number, without a request to the store. In a group that permutes the
// launcher's ranks, one whose number stayed the same may therefore report another rank's end as the cause of
// a loss; the rank and the pid of a LostPeer come from the engine.
bool is_launched(const CreateGroupOptions& options) {
  return base::environment_int(base::EnvVar::kRank) == *options.rank &&
         base::environment_int(base::EnvVar::kWorldSize) == *options.size;
}

// LOCKSTEP_TIMEOUT where the program said nothing.
template <class Options>
Milliseconds timeout_of(const Options& options) {
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

// Engines without peers (fake) need no meeting: a store of their own suffices.
RendezvousResult meet(const InitOptions& options, const BackendParts& parts, Milliseconds timeout) {
  const bool no_peers = !parts.empty() && std::ranges::all_of(parts, [](const BackendPart& part) {
    return has_no_peers(*part.engine);
  });
  if (no_peers && !options.store && options.init_method.empty() && options.world_size) {
    return {.store = std::make_shared<HashStore>(),
            .rank = options.rank.value_or(0),
            .world_size = *options.world_size};
  }
  if (options.store)
    return {.store = options.store, .rank = *options.rank, .world_size = *options.world_size};
  return rendezvous({.init_method = options.init_method.empty() ? "env://" : options.init_method,
                     .rank = options.rank,
                     .world_size = options.world_size,
                     .timeout = timeout});
}

// For the log: who joined what.
void note_joined(const ProcessGroup& group, const std::string& store) {
  if (group.size() == 1) return;
  const bool is_default = group.name() == "0";
  base::log(LogLevel::kInfo,
            base::cat("joined ", is_default ? "a world" : base::cat("group \"", group.name(), "\""), " of ",
                      group.size(), " as rank ", group.rank(), " over ", group.backend_config(), ", store ",
                      store));
}

}  // namespace

std::string wrong_name(const std::string& name) {
  const auto allowed = [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '-' || c == '.' || c == ':';
  };
  const auto digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  if (std::ranges::all_of(name, allowed) && !std::ranges::all_of(name, digit)) return "";
  return base::cat("name is \"", name, "\"; use letters, digits, _ - . and :, not digits alone");
}

Worlds::~Worlds() {
  for (auto& [name, world] : worlds_) {
    if (world->is_of_this_process()) {
      world->leave("");
    } else {
      // A forked child must not end its parent's groups: the copy it holds is left where it is, for ever.
      new std::shared_ptr<World>(std::move(world));
    }
  }
}

void Worlds::note_default(bool entered) const {
  if (this == &process_worlds()) note_process_world(entered);
}

// `name` is in entering_. Ranks meet without the lock; `plan` may block, too.
// entering_ reserves the name for as long as the ranks meet, which may take minutes: other threads are
// refused instead of blocked.
std::shared_ptr<World> Worlds::join(const std::string& name, const std::function<WorldPlan()>& plan) {
  std::shared_ptr<World> made;
  try {
    made = World::join(plan());
  } catch (...) {
    const std::lock_guard lock(mutex_);
    entering_.erase(name);
    throw;
  }
  const std::lock_guard lock(mutex_);
  entering_.erase(name);
  worlds_[name] = made;
  if (name == kDefaultWorld) note_default(true);
  return made;
}

void Worlds::enter(const InitOptions& options) {
  check_options(options);
  if (const auto other = this == &process_worlds() ? other_copy_in_use() : ""; !other.empty()) {
    refuse(options, base::cat("lockstep is in this process twice, in ", this_copy(), " and in ", other,
                              ", which has initialised its default group already; ", kCopiesAdvice));
  }
  {
    const std::lock_guard lock(mutex_);
    if (worlds_.contains(kDefaultWorld))
      refuse(options, "the default group exists already; call destroy_process_group first");
    if (!entering_.insert(kDefaultWorld).second)
      refuse(options, "another thread is inside init_process_group");
  }
  std::string store;
  const auto world = join(kDefaultWorld, [&] {
    const Milliseconds timeout = timeout_of(options);
    WorldPlan plan{.what = name_of_call(options),
                   .name = kDefaultWorld,
                   .store = nullptr,
                   .timeout = timeout,
                   .deadline = Deadline::after(timeout),  // of the meeting and of all that follows
                   .desc = kDefaultWorld,
                   .device = gpu_of(options),
                   .engine_options = options.pg_options};
    if (!options.backend.empty()) plan.parts = parse_backend(options.backend);
    // Blocks until the store is there. The parts were parsed before: a wrong name must not make the others
    // wait.
    const RendezvousResult place = meet(options, plan.parts, timeout);
    plan.store = place.store;
    plan.rank = *place.rank;  // set, as the meeting was not open-ended
    plan.size = *place.world_size;
    base::set_log_rank(plan.size > 1 ? plan.rank : -1);
    if (place.store) store = place.store->describe();
    return plan;
  });
  note_joined(*world->root(), store);
}

Group Worlds::create(const CreateGroupOptions& options) {
  check_options(options);
  {
    const std::lock_guard lock(mutex_);
    if (worlds_.contains(options.name) || !entering_.insert(options.name).second)
      refuse(options, base::cat("there is a group named \"", options.name, "\" already"));
  }
  const auto world = join(options.name, [&] {
    const Milliseconds timeout = timeout_of(options);
    WorldPlan plan{
        .what = name_of_call(options),
        .name = options.name,
        .store = options.store->clone(),  // timeouts of the joining are set on it, not on the caller's
        .keep = options.store,
        .rank = *options.rank,
        .size = *options.size,
        .launched = is_launched(options),
        .timeout = timeout,
        .deadline = Deadline::after(timeout),
        .desc = options.desc.empty() ? "undefined" : options.desc,
        .device = gpu_of(options),
        .engine_options = options.pg_options};
    if (!options.backend.empty()) plan.parts = parse_backend(options.backend);
    return plan;
  });
  note_joined(*world->root(), options.store->describe());
  return world->root();
}

std::shared_ptr<World> Worlds::default_world() const {
  const std::lock_guard lock(mutex_);
  const auto found = worlds_.find(kDefaultWorld);
  return found == worlds_.end() ? nullptr : found->second;
}

// Worlds of another rank thread are not found: handles belong to the rank that made them.
std::shared_ptr<World> Worlds::of(const Group& group, const char* what) const {
  if (!group) {
    if (auto world = default_world()) return world;
    base::raise(ErrorKind::kUsage, base::cat(what, ": ", not_initialised()));
  }
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, world] : worlds_) {
      if (world->contains(group)) return world;
    }
  }
  // A better message where the group was destroyed.
  still_there(group, what);
  base::raise(ErrorKind::kUsage, base::cat(what, ": group \"", group->name(),
                                           "\" is in none of the worlds of this process (or rank thread)"));
}

// Removed under the lock, left outside it (leave, abort): leaving waits for the engine, and its callbacks may
// ask for groups.
std::shared_ptr<World> Worlds::take(const Group& group, const char* what, Group& one) {
  if (!is_group_member(group)) return nullptr;
  const auto world = of(group, what);
  if (group && group != world->root()) {
    if (world->remove(group)) one = group;
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  // Another thread may have taken it meanwhile: then it is that thread's to leave.
  if (std::erase_if(worlds_, [&](const auto& entry) { return entry.second == world; }) == 0) return nullptr;
  if (world->is_default()) note_default(false);
  return world;
}

void Worlds::leave(const Group& group, const std::string& cause) {
  Group one;
  const auto all = take(group, "destroy_process_group", one);
  if (one) close_group(*one, cause);
  if (!all) return;
  all->leave(cause);
  if (all->is_default()) base::set_log_rank(-1);
}

// Taken out first: whatever asks for groups meanwhile finds none instead of half-closed ones.
void Worlds::leave_all(const std::string& cause) {
  std::map<std::string, std::shared_ptr<World>> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(worlds_);
    if (all.contains(kDefaultWorld)) note_default(false);
  }
  for (const auto& [name, world] : all) world->leave(cause);
  if (all.contains(kDefaultWorld)) base::set_log_rank(-1);
}

void Worlds::abort(const Group& group, const std::string& reason) {
  Group one;
  const auto all = take(group, "abort_process_group", one);
  if (one) {
    one->abort(reason);
    close_group(*one, "");
  }
  if (!all) return;
  all->abort(reason);
  all->leave("");
  if (all->is_default()) base::set_log_rank(-1);
}

// The new world takes the place of the old one before that is left: at no time is there none.
Group Worlds::shrink(const Group& old, const std::vector<int>& excluded, bool abort_first,
                     Milliseconds timeout) {
  const auto before = of(old, "shrink_group");
  if (abort_first) before->abort("shrink_group was called with the abort flag");
  const auto made = before->shrink(excluded, timeout);
  {
    const std::lock_guard lock(mutex_);
    for (auto& [name, world] : worlds_) {
      if (world == before) world = made;
    }
  }
  if (made->is_default()) base::set_log_rank(made->root()->size() > 1 ? made->rank() : -1);
  before->leave("");
  return made->root();
}

Group Worlds::group() const {
  const auto world = default_world();
  return world ? world->root() : nullptr;
}

std::vector<Group> Worlds::find(const std::string& name) const {
  std::vector<Group> all;
  const std::lock_guard lock(mutex_);
  for (const auto& [world_name, world] : worlds_) {
    if (auto found = world->find(name)) all.push_back(std::move(found));
  }
  return all;
}

void Worlds::raise_timeouts(Milliseconds timeout) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, world] : worlds_) world->raise_timeouts(timeout);
}

int Worlds::n_counted() const {
  const auto world = default_world();
  return world ? world->n_counted() : 0;
}

Worlds& process_worlds() {
  // Destroyed at the end of the process, when it leaves what the program did not; the engines it needs are
  // never destroyed.
  static Worlds worlds;
  return worlds;
}

Worlds& current_worlds() {
  // A rank thread has worlds of its own; every other thread shares the process's.
  const base::RankThread* rank = base::this_rank_thread();
  return rank != nullptr && rank->world != nullptr ? *static_cast<Worlds*>(rank->world) : process_worlds();
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
  current_worlds().raise_timeouts(timeout);
}

std::shared_ptr<RankUse> current_rank_use() {
  return base::this_rank_thread() == nullptr ? nullptr : current_worlds().rank_use;
}

}  // namespace lockstep::internal
