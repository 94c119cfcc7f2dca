#include "lockstep/group/internal/world_state.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "lockstep/base/environment.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/host/host.h"
#include "lockstep/rendezvous/rendezvous.h"
#include "lockstep/store/prefix_store.h"
#include "lockstep/store/store_collectives.h"

namespace lockstep::internal {
namespace {

// The part of the store that everything of a world lies in, and the default group's description.
constexpr const char* kDefaultPart = "default_pg";
// Groups are numbered from 0; the default one comes first.
constexpr const char* kDefaultName = "0";
// In the group's part of the store: the words of the first rank that could not join.
constexpr const char* kFailedKey = "failed";

[[noreturn]] void refuse(const InitOptions& options, const std::string& words) {
  char where[kWhereCapacity];
  write_where(options.where, where);
  raise(ErrorKind::kUsage, cat("init_process_group (called at ", where, "): ", words));
}

void check_options(const InitOptions& options) {
  if (options.store && !options.init_method.empty()) {
    refuse(options, "give init_method or store, not both");
  }
  if (options.store && options.world_size < 1)
    refuse(options, "with a store, world_size must be given and positive");
  if (options.store && options.rank < 0) refuse(options, "with a store, rank must be given and not negative");
  if (options.world_size >= 1 && options.rank >= options.world_size) {
    refuse(options, cat("rank is ", options.rank, ", ranks of a world of ", options.world_size, " are 0 to ",
                        options.world_size - 1));
  }
  if (options.timeout <= Milliseconds::zero()) {
    refuse(options, cat("timeout is ", options.timeout.count(), " ms; it must be positive"));
  }
}

RendezvousResult meet(const InitOptions& options) {
  if (options.store) return {.store = options.store, .rank = options.rank, .world_size = options.world_size};
  return rendezvous({.init_method = options.init_method.empty() ? "env://" : options.init_method,
                     .rank = options.rank,
                     .world_size = options.world_size,
                     .timeout = options.timeout});
}

// Tells the others why this rank cannot join, or learns why another could not: who is first writes the words.
[[noreturn]] void give_up(Store& store, int rank) {
  Failure failure = current_failure();
  Bytes first;
  try {
    first = store.compare_set(kFailedKey, {}, to_bytes(cat(rank, ' ', failure.message)));
  } catch (...) {
    raise(std::move(failure));  // the store is gone too: the first error says more
  }
  std::istringstream words(to_text(first));
  int blamed = rank;
  words >> blamed;
  words.ignore();
  if (blamed == rank) raise(std::move(failure));
  std::string cause;
  std::getline(words, cause, '\0');
  raise(Failure{.kind = ErrorKind::kPeerLost,
                .message = cat("init_process_group: rank ", blamed, " could not join: ", cause),
                .family = ErrorFamily::kBackend,
                .peer = LostPeer{.rank = blamed, .pid = -1, .cause = cause}});
}

std::shared_ptr<Store> whole_store(const std::shared_ptr<Store>& store) {
  const auto* prefixed = dynamic_cast<const PrefixStore*>(store.get());
  return prefixed == nullptr ? store : prefixed->innermost_store();
}

}  // namespace

World::~World() {
  // A forked child must not end its parent's group: the copy it holds is left where it is, for ever.
  if (group_ && owner_pid_ != ::getpid()) new Group(std::move(group_));
  try {
    if (group_) close_group(*group_, "");
  } catch (...) {
    log(LogLevel::kError, cat("leaving the default group at exit failed: ", current_failure().message));
  }
}

void World::enter(const InitOptions& options) {
  check_options(options);
  {
    const std::lock_guard lock(mutex_);
    if (group_) refuse(options, "the default group exists already; call destroy_process_group first");
    if (entering_) refuse(options, "another thread is inside init_process_group");
    entering_ = true;
  }
  Group group;
  try {
    group = join(options);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    entering_ = false;
    throw;
  }
  const std::lock_guard lock(mutex_);
  entering_ = false;
  owner_pid_ = ::getpid();
  group_ = std::move(group);
}

Group World::join(const InitOptions& options) {
  const comm::Engine& engine = choose_engine(options.backend);
  const RendezvousResult place = meet(options);
  set_log_rank(place.world_size > 1 ? place.rank : -1);
  // Counted alike on every rank, so that a world entered again never meets keys of the one before.
  const int generation = generation_++;
  const std::string prefix = generation == 0 ? kDefaultPart : cat(kDefaultPart, "/#", generation);
  auto store = place.store ? std::make_shared<PrefixStore>(prefix, place.store) : nullptr;
  std::vector<int> ranks(static_cast<std::size_t>(place.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  GroupPlace mine{.name = kDefaultName,
                  .rank = place.rank,
                  .members = Members(std::move(ranks)),
                  .store = store,
                  .shared = std::make_shared<GroupShared>(options.timeout, kDefaultPart),
                  .devices = {"cpu"}};
  if (place.world_size == 1) return make_solo_group(std::move(mine));
  if (!store) raise(ErrorKind::kInternal, "rendezvous gave no store to a world of more than one");
  try {
    auto group = make_engine_group({.place = std::move(mine),
                                    .engine = &engine,
                                    .engine_store = std::make_shared<PrefixStore>("cpu", store),
                                    .root = whole_store(place.store),
                                    .failed_key = kFailedKey});
    if (environment_flag(Var::kDistInitBarrier)) {
      store_barrier(*store, place.rank, place.world_size, "init_barrier", options.timeout);
    }
    log(LogLevel::kInfo, cat("joined a world of ", place.world_size, " as rank ", place.rank, " over engine ",
                             engine.name(), ", store ", place.store->describe()));
    return group;
  } catch (...) {
    give_up(*store, place.rank);
  }
}

void World::leave(const Group& group, const std::string& cause) {
  Group mine;
  {
    const std::lock_guard lock(mutex_);
    if (!group_) {
      raise(ErrorKind::kUsage, "destroy_process_group: the default process group is not initialised");
    }
    if (group && group != group_) {
      raise(ErrorKind::kUsage,
            cat("destroy_process_group: group \"", group->name(), "\" is not one of this world's"));
    }
    mine = std::move(group_);
  }
  close_group(*mine, cause);
  set_log_rank(-1);
}

Group World::group() const {
  const std::lock_guard lock(mutex_);
  return group_;
}

World*& thread_world() {
  thread_local World* world = nullptr;
  return world;
}

World& current_world() {
  static World process_world;
  World* mine = thread_world();
  return mine != nullptr ? *mine : process_world;
}

comm::EngineRegistry& engines() {
  static comm::EngineRegistry& registry = []() -> comm::EngineRegistry& {
    // Leaked on purpose: groups refer to engines until the very end of the process.
    auto* made = new comm::EngineRegistry;
    made->add(comm::Engine(comm::host_engine(), "built in"));
    return *made;
  }();
  return registry;
}

const comm::Engine& choose_engine(const std::string& backend) {
  std::string name = comm::lower_case(backend);
  if (name.empty()) name = "host";
  const auto colon = name.find(':');
  if (name.find(',') != std::string::npos || name.find(':', colon + 1) != std::string::npos || colon == 0) {
    raise(ErrorKind::kUsage, cat("backend \"", backend,
                                 "\": write one engine (\"host\") or one pair of device and engine "
                                 "(\"cpu:host\")"));
  }
  if (colon != std::string::npos && name.substr(0, colon) != "cpu") {
    raise(ErrorKind::kUnsupported, cat("backend \"", backend, "\": there are engines for device cpu only"));
  }
  if (colon != std::string::npos) name = name.substr(colon + 1);
  if (const comm::Engine* engine = engines().find(name)) return *engine;
  std::string known;
  for (const auto& each : engines().names()) known += (known.empty() ? "" : ", ") + each;
  raise(ErrorKind::kUnsupported, cat("backend \"", backend, "\": no engine of that name; there is: ", known,
                                     ". load_engine() adds plug-ins"));
}

}  // namespace lockstep::internal
