#include "lockstep/group/internal/group_builder.h"
#include "lockstep/base/detail/timeout.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <numeric>
#include <sstream>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/debug/debug.h"
#include "lockstep/debug/detail/checker.h"
#include "lockstep/debug/detail/rank_list.h"
#include "lockstep/group/detail/sha1.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/store/prefix_store.h"
#include "lockstep/store/store_collectives.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::internal {
namespace {

// In a group's part of the store: why the first rank that failed could not join.
constexpr const char* kFailedKey = "failed";
// In a group's part of the store: its members, as the first to come saw them.
constexpr const char* kMembersKey = "members";

// While it lives no request to the store outlasts the joining: a server may accept connections and never
// answer, and the handles' own timeout, the store's, is for what is asked later.
class StoreDeadline {
 public:
  StoreDeadline(const WorldSite& site, Deadline deadline) {
    for (const auto& store : {site.handles.sets, site.handles.gets, site.handles.checks, site.root}) {
      if (store) guards_.emplace_back(*store, within(store->timeout(), deadline));
    }
  }

 private:
  // deque: a guard does not move.
  std::deque<StoreTimeoutGuard> guards_;
};

// For the message of a rank that gives up: the store may be the cause.
constexpr Milliseconds kLastMessage{5'000};

// Publishes why this rank cannot join, or finds out why another could not: the first to fail writes the
// message.
[[noreturn]] void give_up(Store& store, const char* what, int rank) {
  Failure failure = base::current_failure();
  Bytes first;
  try {
    const StoreTimeoutGuard brief(store, within(store.timeout(), Deadline::after(kLastMessage)));
    first = store.compare_set(kFailedKey, {}, to_bytes(base::cat(rank, ' ', failure.message)));
    // Engines do not know which call they work for.
    if (!failure.message.starts_with(what)) failure.message = base::cat(what, ": ", failure.message);
  } catch (...) {
    base::raise(std::move(failure));  // the store is gone too: the first error says more
  }
  std::istringstream in(to_text(first));
  int blamed = rank;
  in >> blamed;
  in.ignore();
  if (blamed == rank) base::raise(std::move(failure));
  std::string cause;
  std::getline(in, cause, '\0');
  base::raise(Failure{.kind = ErrorKind::kPeerLost,
                      .message = base::cat(what, ": rank ", blamed, " could not join: ", cause),
                      .family = ErrorFamily::kBackend,
                      .peer = LostPeer{.rank = blamed, .cause = cause}});
}

// Launchers publish at the store's top, below no prefix.
std::shared_ptr<Store> whole_store(const std::shared_ptr<Store>& store) {
  const auto* prefixed = dynamic_cast<const PrefixStore*>(store.get());
  return prefixed == nullptr ? store : prefixed->innermost_store();
}

std::shared_ptr<Store> under(const std::shared_ptr<Store>& store, const std::string& folder) {
  return folder.empty() ? store : std::make_shared<PrefixStore>(folder, store);
}

// Ranks that make groups in different orders meet under one name with different members.
void check_members(Store& store, const GroupRequest& request) {
  std::string mine;
  for (const int rank : request.members.ranks()) mine += base::cat(mine.empty() ? "" : " ", rank);
  if (mine.size() > 256) mine = base::cat(request.members.ranks().size(), " ranks, SHA-1 ", sha1(mine));
  // Set by the first to come, compared by all others: one request per rank, in whatever order they come.
  const std::string first = to_text(store.compare_set(kMembersKey, {}, to_bytes(mine)));
  if (first == mine) return;
  base::raise(ErrorKind::kUsage, base::cat(request.what, ": here group \"", request.name, "\" has the ranks ",
                                           mine, ", but another rank made it with ", first,
                                           "; all ranks must make the same groups in the same order"));
}

bool all_without_peers(const BackendParts& parts) {
  for (const auto& part : parts) {
    if (!has_no_peers(*part.engine)) return false;
  }
  return true;
}

// What the parts of one group have in common while it is built.
struct GroupBuild {
  const WorldSite& site;
  const GroupRequest& request;
  GroupIdentity identity;                           // devices of no part yet
  std::shared_ptr<Checker> checker;                 // null unless calls are to be compared
  std::function<void()> compare_members = nullptr;  // in the store; null for the default group
};

// Each engine of a group has its own folder in the store, by device type, so that the keys of two engines do
// not meet.
Group build_part(const GroupBuild& build, const BackendPart& part) {
  GroupIdentity identity = build.identity;
  identity.devices = part.devices;
  const WorldSite& site = build.site;
  const auto& ranks = identity.members.ranks();
  if (ranks.size() == 1 && !runs_alone(*part.engine)) return make_solo_group(std::move(identity));
  if (!identity.store)
    base::raise(ErrorKind::kInternal, "rendezvous returned no store for a world of more than one rank");
  // How a rank ended is published under the number that the launcher gave it.
  std::vector<int> launch_ranks;
  for (const int rank : ranks) launch_ranks.push_back(site.launch_ranks[static_cast<std::size_t>(rank)]);
  const std::string folder = build.request.folder;
  const std::string& device = part.devices.front();
  const std::string engine_folder = folder.empty() ? device : base::cat(folder, "/", device);
  auto group =
      make_engine_group({.identity = identity,
                         .engine = part.engine,
                         .stores = {.engine = site.handles.under(engine_folder),
                                    .root = site.root,
                                    .group = under(site.handles.checks, folder)},
                         .engine_store = std::make_shared<PrefixStore>(device, identity.store),
                         .failed_key = kFailedKey,
                         .launch_ranks = std::move(launch_ranks),
                         .deadline = build.request.deadline,
                         .parent = build.request.parent,
                         .key = engine_folder,
                         .device = site.device,
                         .engine_options = part.engine->takes(LOCKSTEP_CUDA) ? site.engine_options : "",
                         .compare_members = build.compare_members});
  if (!build.checker || has_no_peers(*part.engine)) return group;
  return make_checked_group(std::move(identity), group, build.checker);
}

std::shared_ptr<Checker> make_checker(const GroupIdentity& identity) {
  if (get_debug_level() != DebugLevel::kDetail) return nullptr;
  PrefixStore store(base::cat("pg_wrapper:", identity.name), identity.store);
  return std::make_shared<Checker>(store, identity.rank, identity.members.ranks());
}

// A group of ranks on one host may use shared memory although its world spans several: chosen from the hosts
// of its members, which every rank knows.
BackendParts parts_for(const WorldSite& site, const GroupRequest& request) {
  if (lacks_host_memory(request.parts)) return with_host_memory(site.parts, request.parts);
  if (!request.parts.empty()) return request.parts;
  if (site.places.empty()) return site.parts;
  std::vector<RankPlace> places;
  for (const int rank : request.members.ranks())
    places.push_back(site.places[static_cast<std::size_t>(rank)]);
  return choose_default_backend(places);
}

// In the order of the parts, which is the same on all ranks: building a part blocks, and two ranks that built
// two parts in different orders would wait for each other.
Group build_parts(const GroupBuild& build, const BackendParts& parts) {
  std::vector<Group> groups;
  GroupIdentity whole = build.identity;
  whole.devices.clear();
  for (const auto& part : parts) {
    groups.push_back(build_part(build, part));
    whole.devices.insert(whole.devices.end(), part.devices.begin(), part.devices.end());
  }
  return groups.size() == 1 ? groups.front() : make_multi_group(std::move(whole), std::move(groups));
}

// A rank that was given another size would wait for ranks that nobody starts.
void compare_sizes(const WorldSite& site) {
  const std::string mine = base::cat("rank ", site.rank, " joins a world of ", site.size);
  const std::string first = to_text(site.handles.sets->compare_set("size", {}, to_bytes(mine)));
  if (first.ends_with(base::cat(" of ", site.size))) return;
  base::raise(ErrorKind::kUsage,
              base::cat(site.what, ": ", first, ", but ", mine, "; the size (",
                        name_of(base::EnvVar::kWorldSize), ", or the option) must be the same on all ranks"));
}

// One gather, by rank 0: if every rank asked for every other, a world would cost as many requests as it has
// pairs.
void gather_places(WorldSite& site, Milliseconds timeout, Deadline deadline) {
  const std::string roster = "hosts";
  std::vector<std::string> keys;
  for (int rank = 0; rank < site.size; ++rank) keys.push_back(base::cat("host/", rank));
  site.handles.sets->set(keys[static_cast<std::size_t>(site.rank)], to_line(own_place(site.device)));
  Store& store = *site.handles.gets;
  const auto wanted = site.rank == 0 ? keys : std::vector<std::string>{roster};
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int rank = 0; rank < site.size; ++rank) {
      if (!store.check({&keys[static_cast<std::size_t>(rank)], 1})) ranks.push_back(rank);
    }
    if (ranks.empty()) ranks.push_back(0);  // it has not repeated yet who is where
    return ranks;
  };
  const std::string twin =
      site.entered_before
          ? base::cat("; rank ", site.rank,
                      " has entered over this store before: if another process did, two processes have rank ",
                      site.rank)
          : "";
  const auto waiting = [&] {
    return base::cat(site.what, ": rank ", site.rank, " waits for ", name_ranks(missing()), twin);
  };
  if (!await_keys(store, wanted, *site.handles.checks, kFailedKey, deadline, waiting)) {
    base::raise(ErrorKind::kTimeout,
                base::cat(site.what, ": ", name_ranks(missing()), " did not arrive within ", timeout.count(),
                          " ms", twin),
                ErrorFamily::kBackend);
  }
  if (site.rank == 0) {
    std::string lines;
    for (const auto& host : store.multi_get(keys)) {
      lines += to_text(host) + "\n";
      site.places.push_back(from_line(to_text(host)));
    }
    return site.handles.sets->set(roster, lines);
  }
  std::istringstream lines(to_text(store.get(roster)));
  for (std::string host; std::getline(lines, host);) site.places.push_back(from_line(host));
  if (site.places.size() != static_cast<std::size_t>(site.size))
    base::raise(ErrorKind::kInternal, base::cat(site.what, ": rank 0 lists another number of ranks"));
}

}  // namespace

Milliseconds within(Milliseconds own, Deadline deadline) {
  // A user's own store may still mean "forever" by zero.
  const auto left = base::time_left(deadline);
  return own.count() <= 0 ? left : std::min(own, left);
}

// Separate handles for sets, gets and checks: a get that waits must not delay the set that ends it, nor the
// check for a failure.
WorldSite make_site(WorldSiteOptions options) {
  WorldSite site{.what = options.what,
                 .rank = options.rank,
                 .size = options.size,
                 .world = std::make_shared<const WorldInfo>(WorldInfo{
                     .rank = options.rank, .size = options.size, .is_default = options.is_default})};
  site.launch_ranks.resize(static_cast<std::size_t>(options.size));
  std::iota(site.launch_ranks.begin(), site.launch_ranks.end(), 0);
  site.base = std::move(options.base);
  if (!site.base) return site;
  site.store = std::make_shared<PrefixStore>(options.prefix, site.base);
  const Milliseconds own = site.base->timeout();
  {
    const StoreTimeoutGuard joining(*site.base,
                                    within(own, options.deadline));  // clones connect, and inherit it
    site.handles = StoreHandles::open(*site.store);
    site.root = whole_store(site.base)->clone();
  }
  for (const auto& store : {site.handles.sets, site.handles.gets, site.handles.checks, site.root})
    store->set_timeout(own);
  return site;
}

void choose_by_places(WorldSite& site, Milliseconds timeout, Deadline deadline) {
  if (site.size == 1) {
    site.parts = parse_backend("host");
    // A group of one does not use its engine, and serves whatever libtorch has.
    if (device_count(c10::kCUDA) > 0) site.parts.front().devices.emplace_back("cuda");
    return;
  }
  const StoreDeadline until(site, deadline);
  try {
    compare_sizes(site);
    gather_places(site, timeout, deadline);
  } catch (...) {
    give_up(*site.handles.sets, site.what, site.rank);
  }
  site.parts = choose_default_backend(site.places);  // every rank finds the same
}

Group build_group(const WorldSite& site, const GroupRequest& request) {
  const int rank = request.members.index_of(site.rank);
  const auto store = site.store ? under(site.store, request.folder) : nullptr;
  GroupBuild build{.site = site,
                   .request = request,
                   .identity = {.name = request.name,
                                .world = site.world,
                                .rank = rank,
                                .members = request.members,
                                .store = store,
                                .shared = std::make_shared<GroupShared>(request.timeout, request.desc),
                                .devices = {}},
                   .checker = nullptr};
  const int size = static_cast<int>(request.members.ranks().size());
  const BackendParts parts = parts_for(site, request);
  if (size == 1) return build_parts(build, parts);
  const auto messages = under(site.handles.sets, request.folder);
  const StoreDeadline until(site, request.deadline);
  try {
    if (!request.folder.empty()) build.compare_members = [&] { check_members(*messages, request); };
    build.checker = make_checker(build.identity);
    auto group = build_parts(build, parts);
    // After all parts are built: torch's switch that makes init return on no rank before every rank has come.
    if (base::environment_flag(base::EnvVar::kDistInitBarrier) && !all_without_peers(parts)) {
      store_barrier(*messages, rank, size, "init_barrier", base::time_left(request.deadline));
    }
    return group;
  } catch (...) {
    give_up(*messages, request.what, site.rank);
  }
}

}  // namespace lockstep::internal
