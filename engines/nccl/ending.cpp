// How a communicator breaks, is left and is freed.
#include <chrono>
#include <thread>

#include "engines/nccl/communicator.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {
namespace {

using base::cat;

// How long a revoked stream may take to end. It takes 2 to 5 ms; operations must end within 100 ms of an abort.
constexpr Milliseconds kQuiet{80};

}  // namespace

Failure Communicator::explain() const {
  try {
    throw;
  } catch (const cuda::Error& error) {
    return {.kind = error.result() == cuda::kOutOfMemory ? ErrorKind::kResource : ErrorKind::kSystem,
            .message = cat("rank ", rank(), ": ", error.what()),
            .family = ErrorFamily::kBackend,
            .peer = {}};
  } catch (...) {
    Failure failure = base::current_failure();
    if (failure.kind == ErrorKind::kSystem || failure.kind == ErrorKind::kTimeout)
      failure.message = cat("rank ", rank(), ": ", failure.message);
    return failure;
  }
}

// stopped_ after failure_: whoever sees it finds the failure. From any thread, also one inside a lane.
void Communicator::break_with(Failure failure) {
  {
    const base::MutexLock lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    peers_.tell_broken(*failure_);
    stopped_ = true;
  }
  kick();
}

void Communicator::abort(const std::string& reason) {
  break_with({.kind = ErrorKind::kAborted,
              .message = cat("rank ", rank(), " aborted the group: ", reason),
              .family = ErrorFamily::kBackend,
              .peer = {}});
}

// An orderly leave is told by the progress thread, which first collects what has completed: the others compare.
void Communicator::leave(const char* cause) {
  if (leaving_.exchange(true)) return;
  bool idle = false;
  {
    const base::MutexLock lock(mutex_);
    if (!failure_) {
      failure_ = {.kind = ErrorKind::kAborted,
                  .message = "this rank has left the group",
                  .family = ErrorFamily::kBackend,
                  .peer = {}};
      if (cause != nullptr) {
        peers_.tell_broken({.kind = ErrorKind::kPeerLost,
                            .message = cat(peers_.who(rank()), " is gone: ", cause),
                            .family = ErrorFamily::kBackend,
                            .peer = LostPeer{.rank = rank(), .pid = peers_.pid(rank()), .cause = cause}});
      } else {
        left_in_order_ = true;
        if (!gpu_) peers_.tell_left(completed_);
      }
    }
    stopped_ = true;
    idle = !gpu_ && !serving_;
    if (idle) closed_ = true;
  }
  idle ? peers_.publish() : kick();
}

std::optional<Failure> Communicator::failure() {
  if (!stopped_ && news_mutex_.try_lock()) {
    std::optional<Failure> news;
    {
      const base::MutexLock lock(news_mutex_, std::adopt_lock);
      news = peers_.news(false);
    }
    if (news) break_with(std::move(*news));
  }
  const base::MutexLock lock(mutex_);
  return failure_;
}

// Operations that the device has completed by now have succeeded. The others end when nothing of them runs any more: from
// then on no buffer is written.
void Communicator::wind_down() {
  Gpu* const gpu = gpu_now_.load(std::memory_order_acquire);
  if (!wound_down_) {
    wound_down_ = true;
    if (gpu != nullptr) {
      try {
        pump_lanes(*gpu);
      } catch (...) {
        // The lane has failed: it is revoked below.
      }
    }
    {
      const base::MutexLock lock(mutex_);
      orderly_ = left_in_order_ && pending_.empty();
      if (left_in_order_) peers_.tell_left(completed_);
    }
    peers_.publish();
    const auto for_lanes = [&](const auto& call) {
      if (gpu == nullptr) return;
      call(gpu->collectives);
      for (const auto& [ranks, lane] : gpu->messages) call(*lane);
    };
    if (!orderly_) for_lanes([](Lane& lane) { lane.revoke(); });
    const Deadline patience = Deadline::after(kQuiet);
    for (bool quiet = false; !quiet && !patience.expired();) {
      quiet = true;
      for_lanes([&](Lane& lane) { quiet = lane.quiet() && quiet; });
      if (!quiet) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    messages_.clear();
  }
  end_pending();
  if (leaving_) close_lanes();
}

void Communicator::end_pending() {
  for (;;) {
    OperationPtr operation;
    std::optional<Failure> why;
    {
      const base::MutexLock lock(mutex_);
      posted_messages_.clear();
      if (pending_.empty()) return;
      operation = pending_.front();
      why = failure_;
    }
    complete(operation, why);
  }
}

void Communicator::close_lanes() {
  if (Gpu* const gpu = gpu_now_.load(std::memory_order_acquire)) {
    for (const auto& [ranks, lane] : gpu->messages) lane->close(orderly_);
    gpu->collectives.close(orderly_);
  }
  const base::MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool Communicator::wait_closed(Deadline deadline) {
  const base::MutexLock lock(mutex_);
  const bool closed = changed_.wait_until(mutex_, deadline.time_point(),
                                          [&]() LOCKSTEP_REQUIRES(mutex_) { return closed_ && !serving_; });
  return closed;
}

}  // namespace lockstep::nccl_plugin
