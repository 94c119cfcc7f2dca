#include "lockstep/host/internal/progress_service.h"
#include "lockstep/local/wake.h"

#include <algorithm>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/thread.h"

namespace lockstep::comm::internal {

std::shared_ptr<ProgressService> ProgressService::join(const lockstep_comm_config& config) {
  std::shared_ptr<ProgressService> service(new ProgressService(HostPeers::join(config)));
  try {
    using local::DeathWatch;
    std::vector<DeathWatch::Watched> others;
    for (int r = 0; r < service->host_peers_->size(); ++r)
      others.push_back({r, &service->host_peers_->peer(r).process});
    service->watch_ = std::make_unique<DeathWatch>(
        std::move(others),
        [self = service.get()](int rank, DeathWatch::Loss loss) { self->tell_loss(rank, loss); });
  } catch (...) {
    // The others have joined already and would wait for this rank.
    service->host_peers_->say_left();
    throw;
  }
  return service;
}

ProgressService::ProgressService(std::unique_ptr<HostPeers> host_peers)
    : host_peers_(std::move(host_peers)) {}

// No communicator is left: each holds a shared_ptr to the service.
ProgressService::~ProgressService() {
  {
    const base::MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake();
  worker_.join();
  watch_.reset();
}

// Registered and informed under telling_: a loss is either in lost_ already, or tell_loss() runs after this
// and finds the communicator in served_. None is missed, none is reported twice.
void ProgressService::add(Served& served) {
  const base::MutexLock telling(telling_);
  {
    const base::MutexLock lock(mutex_);
    // Before anything is changed: a communicator that finds no memory here is destroyed without remove().
    served_.reserve(served_.size() + 1);
    // For engage(), which follows a post that cannot be undone and must not want memory.
    engaged_.reserve(engaged_.size() + served_.size() + 1);
    served_.push_back(&served);
  }
  for (const auto& [rank, cause] : lost_) {
    if (served.needs(rank)) served.lost(rank, cause);
  }
}

void ProgressService::remove(Served& served) {
  const base::MutexLock telling(telling_);
  const base::MutexLock lock(mutex_);
  std::erase(served_, &served);
  std::ranges::replace(engaged_, &served, static_cast<Served*>(nullptr));
  // telling_ is held while this waits. That cannot deadlock: the worker, which is waited for, never takes
  // telling_.
  changed_.wait(mutex_, [&]() LOCKSTEP_REQUIRES(mutex_) { return serving_ != &served; });
}

// Double-checked: post() calls this for every operation, and after the first one it costs a load. release and
// acquire publish worker_ itself to a thread that skips the lock.
void ProgressService::start() {
  if (started_.load(std::memory_order_acquire)) return;
  const base::MutexLock lock(mutex_);
  if (!worker_.joinable()) worker_ = base::Thread("ls-progress", [this] { work(); });
  started_.store(true, std::memory_order_release);
}

// An engaged communicator stays in the list until a pass finds it idle (drop_idle), so posting often does not
// make the list longer.
void ProgressService::engage(Served& served) {
  {
    const base::MutexLock lock(mutex_);
    if (std::ranges::find(engaged_, &served) == engaged_.end()) engaged_.push_back(&served);
  }
  wake();
}

void ProgressService::wake() {
  local::ring(host_peers_->own().doorbell);
}

// Blocks of destroyed communicators wait here until every member has released them; each later retirement
// frees what has become free. The rest is freed with the arena.
void ProgressService::retire(std::unique_ptr<CommMembers> members) {
  members->release();
  const base::MutexLock lock(mutex_);
  retired_.push_back(std::move(members));
  std::erase_if(retired_, [](const auto& each) {
    if (!each->all_released()) return false;
    each->free_kept();
    return true;
  });
}

//   pass, nothing blocked ----------------------------> sleep; only ring() wakes it (posted, stopped, loss)
//   pass, something blocked --> announce --> pass again --> sleep until `until`; other ranks ring as well
//
// The ticket is drawn before anything is looked at, so whatever is posted, rung or stopped afterwards ends
// the sleep at once. The others need to ring only while something is blocked: an idle worker is not
// announced, and costs them nothing.
void ProgressService::work() {
  local::Doorbell& door = host_peers_->own().doorbell;
  const auto stopping = [&] {
    const base::MutexLock lock(mutex_);
    return stopping_;
  };
  for (bool stuck = false;;) {
    const std::uint32_t ticket = stuck ? local::announce(door) : local::ticket_of(door);
    Deadline until = Deadline::never();
    const bool announced = stuck, over = stopping();
    stuck = !over && pass(announced, until);
    drop_idle();
    // Blocked, and not announced yet: announce, and pass once more.
    if (!over && (announced || !stuck)) local::sleep(door, ticket, until);
    if (announced) local::retract(door);
    if (over) return;
  }
}

// serving_ marks the communicator that the worker is inside of: remove() waits for it to change, and replaces
// the entry by null instead of erasing it, so that the index stays valid.
bool ProgressService::pass(bool last_look, Deadline& until) {
  bool stuck = false;
  base::MutexLock lock(mutex_);
  for (std::size_t i = 0; i < engaged_.size(); ++i) {
    if (engaged_[i] == nullptr) continue;
    serving_ = engaged_[i];
    Served& served = *serving_;
    lock.unlock();
    stuck = served.serve(last_look, until) == Served::State::kStuck || stuck;
    lock.lock();
    serving_ = nullptr;
    changed_.notify_all();
  }
  return stuck;
}

void ProgressService::drop_idle() {
  const base::MutexLock lock(mutex_);
  std::erase_if(engaged_, [](const Served* served) { return served == nullptr || !served->busy(); });
}

// On the thread of the watch. The count grows before the lock is taken: loss_of() then waits for the lock,
// and with it for the cause.
void ProgressService::tell_loss(int host_rank, local::DeathWatch::Loss loss) {
  n_lost_.fetch_add(1, std::memory_order_seq_cst);
  const base::MutexLock telling(telling_);
  std::vector<Served*> concerned;
  {
    const base::MutexLock lock(mutex_);
    concerned = served_;
  }
  std::erase_if(concerned, [&](Served* served) { return !served->needs(host_rank); });
  // Nobody is concerned: no need to wait for the cause, which takes up to 300 ms. It is kept for
  // communicators that are created later.
  if (concerned.empty()) {
    lost_.emplace_back(host_rank, "its process has ended");
    return wake();
  }
  const std::string cause = loss == local::DeathWatch::Loss::kExec
                                ? "its process became another program (exec), or closed its descriptors"
                                : concerned.front()->cause_of_loss(host_rank);
  lost_.emplace_back(host_rank, cause);
  for (Served* served : concerned) served->lost(host_rank, cause);
  wake();
}

std::optional<std::string> ProgressService::loss_of(int host_rank) {
  if (n_lost_.load(std::memory_order_seq_cst) == 0) return std::nullopt;
  const base::MutexLock telling(telling_);  // until the cause is known
  for (const auto& [rank, cause] : lost_) {
    if (rank == host_rank) return cause;
  }
  return std::nullopt;
}

}  // namespace lockstep::comm::internal
