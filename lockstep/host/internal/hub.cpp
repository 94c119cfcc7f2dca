#include "lockstep/host/internal/hub.h"
#include "lockstep/local/wake.h"

#include <algorithm>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/thread.h"

namespace lockstep::comm::internal {

std::shared_ptr<Hub> Hub::join(const lockstep_comm_config& config) {
  std::shared_ptr<Hub> hub(new Hub(Fabric::join(config)));
  try {
    using local::DeathWatch;
    std::vector<DeathWatch::Watched> others;
    for (int r = 0; r < hub->fabric_->size(); ++r) others.push_back({r, &hub->fabric_->peer(r).process});
    hub->watch_ = std::make_unique<DeathWatch>(
        std::move(others),
        [self = hub.get()](int rank, DeathWatch::Loss loss) { self->tell_loss(rank, loss); });
  } catch (...) {
    hub->fabric_->say_left();
    throw;
  }
  return hub;
}

Hub::Hub(std::unique_ptr<Fabric> fabric) : fabric_(std::move(fabric)) {}

Hub::~Hub() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  worker_.join();
  watch_.reset();
}

void Hub::add(Served& served) {
  const std::lock_guard telling(telling_);
  {
    const std::lock_guard lock(mutex_);
    members_.push_back(&served);
  }
  for (const auto& [rank, cause] : lost_) {
    if (served.needs(rank)) served.lost(rank, cause);
  }
}

void Hub::remove(Served& served) {
  const std::lock_guard telling(telling_);
  std::unique_lock lock(mutex_);
  std::erase(members_, &served);
  std::ranges::replace(engaged_, &served, static_cast<Served*>(nullptr));
  changed_.wait(lock, [&] { return serving_ != &served; });
}

void Hub::start() {
  if (started_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  if (!worker_.joinable()) worker_ = base::Thread("ls-comm", [this] { work(); });
  started_.store(true, std::memory_order_release);
}

void Hub::engage(Served& served) {
  {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(engaged_, &served) == engaged_.end()) engaged_.push_back(&served);
  }
  wake();
}

void Hub::wake() {
  local::ring(fabric_->own().doorbell);
}

void Hub::retire(std::unique_ptr<Circle> circle) {
  circle->depart();
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(circle));
  std::erase_if(retired_, [](const auto& each) {
    if (!each->all_departed()) return false;
    each->free_blocks();
    return true;
  });
}

// The ticket is drawn before anything is looked at, so whatever is posted, rung or stopped afterwards ends the sleep at
// once. Only while something is stuck do the others have to ring: an idle worker is not announced.
void Hub::work() {
  local::Doorbell& door = fabric_->own().doorbell;
  const auto stopping = [&] {
    const std::lock_guard lock(mutex_);
    return stopping_;
  };
  for (bool stuck = false;;) {
    const std::uint32_t ticket = stuck ? local::announce(door) : local::ticket_of(door);
    Deadline until = Deadline::never();
    const bool announced = stuck, over = stopping();
    stuck = !over && pass(announced, until);
    drop_idle();
    // Stuck, and not announced yet: announce, and look once more.
    if (!over && (announced || !stuck)) local::sleep(door, ticket, until);
    if (announced) local::retract(door);
    if (over) return;
  }
}

bool Hub::pass(bool last_look, Deadline& until) {
  bool stuck = false;
  std::unique_lock lock(mutex_);
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

void Hub::drop_idle() {
  const std::lock_guard lock(mutex_);
  std::erase_if(engaged_, [](const Served* served) { return served == nullptr || !served->busy(); });
}

void Hub::tell_loss(int fabric_rank, local::DeathWatch::Loss loss) {
  n_lost_.fetch_add(1, std::memory_order_seq_cst);
  const std::lock_guard telling(telling_);
  std::vector<Served*> members;
  {
    const std::lock_guard lock(mutex_);
    members = members_;
  }
  std::erase_if(members, [&](Served* served) { return !served->needs(fabric_rank); });
  if (members.empty()) {
    lost_.emplace_back(fabric_rank, "its process has ended");
    return wake();
  }
  const std::string cause = loss == local::DeathWatch::Loss::kExec
                                ? "its process became another program (exec), or closed its descriptors"
                                : members.front()->cause_of_loss(fabric_rank);
  lost_.emplace_back(fabric_rank, cause);
  for (Served* served : members) served->lost(fabric_rank, cause);
  wake();
}

std::optional<std::string> Hub::loss_of(int fabric_rank) {
  if (n_lost_.load(std::memory_order_seq_cst) == 0) return std::nullopt;
  const std::lock_guard telling(telling_);  // until the cause is known
  for (const auto& [rank, cause] : lost_) {
    if (rank == fabric_rank) return cause;
  }
  return std::nullopt;
}

}  // namespace lockstep::comm::internal
