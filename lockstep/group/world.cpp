#include "lockstep/group/world.h"

#include <exception>
#include <mutex>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/log.h"
#include "lockstep/group/detail/call_report.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/internal/worlds.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {

using internal::current_worlds;
using internal::RankUse;
using internal::still_there;
using internal::Worlds;

// current_worlds(): those of the rank thread that calls, inside run_threads, otherwise those of the process. All
// functions below go through it, so that code written for one rank per process runs unchanged as a rank thread.
// Its own mutex guards it; nothing here holds a lock.

void init_process_group(InitOptions options) {
  internal::timed_call("init_process_group", options.where, nullptr,
                       [&] { current_worlds().enter(options); });
}

Group create_group(CreateGroupOptions options) {
  return internal::timed_call("create_group", options.where, nullptr,
                              [&]() -> Group { return current_worlds().create(options); });
}

void destroy_process_group(Group group) {
  const auto where = std::source_location::current();  // it has no options
  internal::timed_call("destroy_process_group", where, group.get(),
                       [&] { current_worlds().leave(group, ""); });
}

std::string load_engine(const std::string& path) {
  return internal::engines().add(comm::load_engine(path)).name();
}

bool is_available() noexcept {
  // torch can be built without its distributed part; this library cannot.
  return true;
}

bool is_initialized() noexcept {
  return current_worlds().group() != nullptr;
}

bool is_torchelastic_launched() noexcept {
  return base::environment(base::EnvVar::kElasticRunId).has_value();
}

bool is_backend_available(const std::string& name) noexcept {
  try {
    return !name.empty() && !internal::parse_backend(name).empty();
  } catch (...) {
    return false;
  }
}

bool is_gloo_available() noexcept {
  return is_backend_available("gloo");
}
bool is_mpi_available() noexcept {
  return is_backend_available("mpi");
}
// The plug-in is part of lockstep; whether it finds NCCL and a GPU is what is asked.
bool is_nccl_available() noexcept {
  try {
    const comm::Engine* const engine = internal::find_engine("nccl");
    char identity[256] = "";
    return engine != nullptr && engine->table().device_identity != nullptr &&
           engine->table().device_identity(LOCKSTEP_CUDA, 0, identity, sizeof identity) == LOCKSTEP_OK;
  } catch (...) {
    return false;
  }
}
bool is_ucc_available() noexcept {
  return is_backend_available("ucc");
}
bool is_xccl_available() noexcept {
  return is_backend_available("xccl");
}

Group default_group() {
  if (auto group = current_worlds().group()) return group;
  base::raise(ErrorKind::kUsage, internal::not_initialised());
}

int get_rank(const Group& group) {
  return still_there(group, "get_rank")->rank();
}

int get_world_size(const Group& group) {
  return still_there(group, "get_world_size")->size();
}

void set_timeout(Milliseconds timeout, const Group& group) {
  const auto chosen = still_there(group, "set_timeout");
  if (!chosen->is_member())
    base::raise(ErrorKind::kUsage, "set_timeout: this rank is not a member of the group");
  chosen->set_timeout(timeout);
}

std::string get_backend(const Group& group) {
  return still_there(group, "get_backend")->backend();
}

std::string get_backend_config(const Group& group) {
  return still_there(group, "get_backend_config")->backend_config();
}

std::vector<int> get_process_group_ranks(const Group& group) {
  const auto chosen = still_there(group, "get_process_group_ranks");
  if (!chosen->is_member())
    base::raise(ErrorKind::kUsage, "get_process_group_ranks: this rank is not a member of the group");
  return chosen->ranks();
}

int get_pg_count() noexcept {
  return current_worlds().n_counted();
}

int get_node_local_rank(std::optional<int> fallback) {
  if (const auto rank = base::environment_int(base::EnvVar::kLocalRank)) return static_cast<int>(*rank);
  if (fallback) return *fallback;
  base::raise(ErrorKind::kUsage,
              base::cat(name_of(base::EnvVar::kLocalRank),
                        " is not set: start with a launcher that sets it, or give a fallback"));
}

namespace {

// What the rank threads of one run_threads call share. run_threads: the first exception of any rank is
// rethrown to the caller once all have ended.
struct ThreadJob {
  const std::function<void(int)>& fn;
  const RunThreadsOptions& options;
  const int n;
  const std::shared_ptr<Store> store;
  std::mutex mutex;
  std::exception_ptr first;  // guarded by mutex

  void record() {
    const std::lock_guard lock(mutex);
    if (!first) first = std::current_exception();
  }
};

// Locals end in reverse: first callbacks that work for this rank are waited for, then the thread stops being
// the rank. Its worlds were left before, in the body.
void run_rank(ThreadJob& job, int rank) {
  Worlds worlds;
  base::RankThread self{.world = &worlds};
  const base::RankThreadScope scope(&self);
  worlds.rank_use = std::make_shared<RankUse>(&self);
  // Callbacks that work for this rank are over before it is.
  struct End {
    ~End() { use.end(); }
    RankUse& use;
  } end{*worlds.rank_use};
  try {
    worlds.enter({.backend = job.options.backend,
                  .timeout = job.options.timeout,
                  .world_size = job.n,
                  .rank = rank,
                  .store = job.store->clone()});
    job.fn(rank);
    worlds.leave_all("");
  } catch (...) {
    // Recorded before the others can be notified, so that the cause is recorded before its consequences.
    job.record();
    const std::string cause = "threw: " + base::current_failure().message;
    try {
      worlds.leave_all(cause);
    } catch (...) {
      base::log(LogLevel::kError,
                base::cat("rank ", rank, " could not leave: ", base::current_failure().message));
    }
  }
}

}  // namespace

void run_threads(int n, const std::function<void(int rank)>& fn, RunThreadsOptions options) {
  if (n < 1)
    base::raise(ErrorKind::kUsage, base::cat("run_threads: ", n, " ranks requested; at least 1 is needed"));
  if (!fn) base::raise(ErrorKind::kUsage, "run_threads: no function given");
  if (base::this_rank_thread() != nullptr) {
    base::raise(ErrorKind::kUsage, "run_threads was called by a rank thread of another run_threads");
  }
  ThreadJob job{
      .fn = fn, .options = options, .n = n, .store = std::make_shared<HashStore>(), .mutex = {}, .first = {}};
  {
    // Joined at the end of the block, also when a thread cannot be started: those that run then wait for ranks
    // that never come, until the timeout of their init.
    std::vector<base::Thread> threads;
    for (int rank = 0; rank < n; ++rank) {
      threads.emplace_back(base::cat("rank ", rank), [&job, rank] { run_rank(job, rank); });
    }
  }
  if (job.first) std::rethrow_exception(job.first);
}

}  // namespace lockstep
