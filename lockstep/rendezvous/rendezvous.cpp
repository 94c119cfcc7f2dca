#include "lockstep/rendezvous/rendezvous.h"

#include <errno.h>

#include <limits>
#include <map>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/rendezvous/internal/detect.h"
#include "lockstep/rendezvous/internal/master_address.h"
#include "lockstep/rendezvous/internal/url.h"
#include "lockstep/store/file_store.h"

namespace lockstep {
namespace {

using internal::Url;

[[noreturn]] void refuse(const Url& url, const std::string& why) {
  base::raise(ErrorKind::kUsage, base::cat("init_method \"", url.text, "\": ", why));
}

// One of rank and world_size, from the argument or the URL, if either has it.
std::optional<int> pick(const Url& url, const char* name, std::optional<int> argument, int low) {
  const auto in_url = url.number(name, low, std::numeric_limits<int>::max());
  if (argument && in_url) {
    refuse(url, base::cat(name, " is given in the URL (", *in_url, ") and as an argument (", *argument,
                          "): give it once"));
  }
  if (argument && *argument < low) refuse(url, base::cat(name, " is ", *argument));
  return in_url ? static_cast<int>(*in_url) : argument;
}

void check_query(const Url& url) {
  for (const auto& [key, value] : url.query) {
    if (key == "rank" || key == "world_size") continue;
    if (key == "use_libuv") {
      if (url.number(key, 0, 1) == 0L) internal::say_one_server("use_libuv=0");
      continue;
    }
    refuse(url, base::cat("unknown argument ", key, "; known are rank, world_size and use_libuv"));
  }
}

void check_place(const Url& url, int rank, int world_size) {
  if (rank < world_size) return;
  refuse(url, base::cat("rank is ", rank, ", but the ranks of a world of ", world_size, " are 0 to ",
                        world_size - 1));
}

// tcp:// and file:// assign no ranks.
internal::Known place_of(const Url& url, const RendezvousOptions& options) {
  const internal::Known place{pick(url, "rank", options.rank, 0),
                              pick(url, "world_size", options.world_size, 1)};
  if (options.open_ended) return {.rank = place.rank};
  if (!place.rank) refuse(url, "rank is missing: give it as an argument or as ?rank= in the URL");
  if (!place.world_size) {
    refuse(url, "world_size is missing: give it as an argument or as ?world_size= in the URL");
  }
  check_place(url, *place.rank, *place.world_size);
  return place;
}

// Four workers that were meant to be one job and are four jobs would train separately without an error. Once
// per process: for a program that is run alone on purpose, one line is enough.
void warn_alone() {
  if (internal::told_alone().exchange(true)) return;
  base::log(
      LogLevel::kWarn,
      base::cat("RANK and WORLD_SIZE are not set: this process is a world of one; to train with several: ",
                "lockstep run -n ", base::available_cores(), " -- ", ::program_invocation_short_name));
}

// Arguments and the URL come before the environment; each of rank and world size may come from another of
// them. Without any, and without an address, the process is a world of one and needs no store.
RendezvousResult from_environment(const Url& url, const RendezvousOptions& options) {
  if (!url.host.empty() || !url.path.empty()) refuse(url, "env:// takes no address; it is in MASTER_ADDR");
  internal::Known place{pick(url, "rank", options.rank, 0), pick(url, "world_size", options.world_size, 1)};
  const Cluster cluster = internal::detect(place);
  if (!place.rank) place.rank = cluster.rank;
  if (!place.world_size) place.world_size = cluster.world_size;
  if (options.open_ended) place.world_size.reset();
  if (!options.open_ended && !place.rank && !place.world_size && cluster.master_addr.empty()) {
    warn_alone();
    return {};
  }
  const auto need = [&](bool there, base::EnvVar var) {
    if (!there) refuse(url, base::cat("environment variable ", name_of(var), " is not set"));
  };
  if (!options.open_ended) {
    need(place.rank.has_value(), base::EnvVar::kRank);
    need(place.world_size.has_value(), base::EnvVar::kWorldSize);
    check_place(url, *place.rank, *place.world_size);
  }
  if (place.world_size == 1 && cluster.master_addr.empty()) return {};
  need(!cluster.master_addr.empty(), base::EnvVar::kMasterAddr);
  need(cluster.master_port.has_value(), base::EnvVar::kMasterPort);
  auto store = internal::open_tcp({.host = cluster.master_addr,
                                   .port = *cluster.master_port,
                                   .rank = place.rank,
                                   .world_size = place.world_size,
                                   .timeout = options.timeout});
  return {std::move(store), place.rank, place.world_size};
}

RendezvousResult from_tcp(const Url& url, const RendezvousOptions& options) {
  if (url.host.empty()) refuse(url, "the host is missing: tcp://host:port");
  if (!url.port || url.port->empty()) refuse(url, "the port is missing: tcp://host:port");
  const long port =
      internal::parse_number(base::cat("init_method \"", url.text, "\": the port"), *url.port, 0, 65535);
  const auto place = place_of(url, options);
  auto store = internal::open_tcp({.host = url.host,
                                   .port = static_cast<int>(port),
                                   .rank = place.rank,
                                   .world_size = place.world_size,
                                   .timeout = options.timeout});
  return {std::move(store), place.rank, place.world_size};
}

// Schemes are a property of the program, as its signal handlers are, and so is where it has been: the state
// of this folder.
struct Registry {
  base::Mutex mutex;
  std::map<std::string, RendezvousHandler> handlers LOCKSTEP_GUARDED_BY(mutex);
  // In this file, as this rank.
  std::map<std::pair<std::string, std::optional<int>>, std::int64_t> meetings LOCKSTEP_GUARDED_BY(mutex);
};

Registry& registry() {
  static Registry instance;
  return instance;
}

// Several meetings of one process (a group and RPC, or one after the other) are normal. A process that is
// forked later has met as its parent did.
std::int64_t note_meeting(const std::string& path, std::optional<int> rank) {
  const base::MutexLock lock(registry().mutex);
  return ++registry().meetings[{path, rank}];
}

RendezvousResult from_file(const Url& url, const RendezvousOptions& options) {
  if (!url.host.empty() && url.host != "localhost") {
    refuse(url, base::cat("the path must be absolute, with three slashes: file:///", url.host, url.path));
  }
  if (url.path.size() < 2) refuse(url, "the path is missing: file:///path");
  const auto place = place_of(url, options);
  std::shared_ptr<Store> store =
      FileStore::open(url.path, {.n_users = place.world_size, .timeout = options.timeout});
  // The counter in the file is compared with this process's own: more in the file means that another process
  // had this rank, most likely in an earlier job.
  const auto n_mine = note_meeting(url.path, place.rank);
  if (!options.open_ended && store->add(base::cat("lockstep/file_ranks/", *place.rank), 1) > n_mine) {
    base::log(LogLevel::kWarn,
              base::cat("rank ", *place.rank, " met in ", url.path,
                        " before: if that was an earlier job, it left the file behind; remove it"));
  }
  return {std::move(store), place.rank, place.world_size};
}

bool is_built_in(const std::string& scheme) {
  return scheme == "env" || scheme == "tcp" || scheme == "file";
}

RendezvousHandler find_handler(const Url& url) {
  const base::MutexLock lock(registry().mutex);
  const auto found = registry().handlers.find(url.scheme);
  if (found != registry().handlers.end()) return found->second;
  std::string known = "env, tcp, file";
  for (const auto& [scheme, handler] : registry().handlers) known += ", " + scheme;
  refuse(url, base::cat("no rendezvous handler for scheme ", url.scheme, "; there are ", known));
}

}  // namespace

std::atomic<bool>& internal::told_alone() {
  static std::atomic<bool> told{false};
  return told;
}

RendezvousResult rendezvous(const RendezvousOptions& options) {
  base::checked_timeout(options.timeout, "rendezvous");
  const Url url = internal::parse_url(options.init_method);
  if (is_built_in(url.scheme)) check_query(url);
  if (url.scheme == "env") return from_environment(url, options);
  if (url.scheme == "tcp") return from_tcp(url, options);
  if (url.scheme == "file") return from_file(url, options);
  // Called without the lock: a handler may itself rendezvous by another scheme.
  RendezvousResult result = find_handler(url)(options);
  if (!result.rank || !result.world_size) {
    if (!options.open_ended) refuse(url, "its handler returned no rank or no world size");
    if (!result.store) refuse(url, "its handler returned no store");
    return result;
  }
  if (*result.rank < 0) refuse(url, base::cat("its handler returned rank ", *result.rank));
  check_place(url, *result.rank, *result.world_size);
  if (*result.world_size > 1 && !result.store) refuse(url, "its handler returned no store");
  return result;
}

void register_rendezvous_handler(const std::string& scheme, RendezvousHandler handler) {
  if (scheme.empty() || !handler)
    base::raise(ErrorKind::kUsage, "a rendezvous handler needs a scheme and a function");
  const base::MutexLock lock(registry().mutex);
  if (is_built_in(scheme) || !registry().handlers.emplace(scheme, std::move(handler)).second) {
    base::raise(ErrorKind::kUsage, base::cat("a rendezvous handler for scheme ", scheme, " exists already"));
  }
}

}  // namespace lockstep
