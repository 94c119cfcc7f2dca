// Events of one device, used again: making one costs as much as a small operation. An event may be recorded again as soon as
// nobody queries it for its earlier use: cuStreamWaitEvent has taken the state it waits for when it returns.
// Thread safety: any thread.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engines/cuda/resources.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::nccl_plugin {

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  // An event, given back when it goes out of scope. It keeps the pool alive.
  class Lent {
   public:
    Lent() = default;
    Lent(std::shared_ptr<EventPool> pool, cuda::OwnedEvent event)
        : pool_(std::move(pool)), event_(std::move(event)) {}
    Lent(Lent&&) = default;
    Lent& operator=(Lent&& other) noexcept {
      give_back();
      pool_ = std::move(other.pool_);
      event_ = std::move(other.event_);
      return *this;
    }
    ~Lent() { give_back(); }
    cuda::Event get() const { return event_.get(); }
    explicit operator bool() const { return static_cast<bool>(event_); }

   private:
    void give_back() {
      if (pool_ && event_) pool_->take_back(std::move(event_));
      pool_.reset();
    }
    std::shared_ptr<EventPool> pool_;
    cuda::OwnedEvent event_;
  };

  explicit EventPool(const cuda::PrimaryContext& context) : context_(context) {}
  const cuda::PrimaryContext& context() const { return context_; }
  // Throws cuda::Error. Pre: the context is current.
  Lent lend() {
    {
      const base::MutexLock lock(mutex_);
      if (!idle_.empty()) {
        Lent lent(shared_from_this(), std::move(idle_.back()));
        idle_.pop_back();
        return lent;
      }
    }
    return {shared_from_this(), cuda::create_event(context_)};
  }

 private:
  void take_back(cuda::OwnedEvent event) noexcept {
    try {
      const base::MutexLock lock(mutex_);
      idle_.push_back(std::move(event));
    } catch (...) {
      // No memory for the list: the event is destroyed instead.
    }
  }

  const cuda::PrimaryContext& context_;
  base::Mutex mutex_;
  std::vector<cuda::OwnedEvent> idle_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::nccl_plugin
