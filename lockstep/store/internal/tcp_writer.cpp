#include "lockstep/store/internal/tcp_writer.h"
#include "lockstep/base/detail/raise.h"

#include <new>
#include <utility>

namespace lockstep::internal {

namespace {

// Posting waits for the thread beyond this.
constexpr std::size_t kMostGathered = 256 << 10;

}  // namespace

TcpWriter::TcpWriter(net::Channel channel) : channel_(std::move(channel)) {}

TcpWriter::~TcpWriter() {
  if (!thread_) return;
  if (!made_here_) {
    static_cast<void>(thread_.release());  // it is the parent's, and cannot be joined here
    // Nor would it ever leave the wait that the end of a condition variable waits for.
    new (&something_) base::ConditionVariable;
    new (&sent_) base::ConditionVariable;
    return;
  }
  {
    const base::MutexLock lock(mutex_);
    stop_ = true;
  }
  something_.notify_one();
  channel_.socket().shut_down();  // it may be blocked in a write to a server that does not read
}

void TcpWriter::check() {
  if (!made_here_) {
    base::raise(
        ErrorKind::kUsage,
        "this store was opened by the parent of this process; open one here, or clone it before the fork",
        ErrorFamily::kStore);
  }
}

// Until the channel's sending half is the caller's, for as long as it holds the lock.
void TcpWriter::await_thread(Deadline deadline) {
  if (!sent_.wait_until(mutex_, deadline.time_point(),
                        [this]() LOCKSTEP_REQUIRES(mutex_) { return !sending_; })) {
    base::raise(ErrorKind::kTimeout, "the store did not take what was written before the deadline",
                ErrorFamily::kNetwork);
  }
  if (failure_) base::raise(*failure_);
}

// Everything gathered before goes out first, in the same write: the server sees requests in the order of the
// calls.
void TcpWriter::send(std::span<const std::uint8_t> request, Deadline deadline) {
  check();
  const base::MutexLock lock(mutex_);
  in_a_row_ = 0;
  if (thread_) await_thread(deadline);
  if (gathered_.empty()) return channel_.write_all(request, deadline);
  gathered_.insert(gathered_.end(), request.begin(), request.end());
  channel_.write_all(gathered_, deadline);
  gathered_.clear();
}

// A single set is written at once; only a run of them is gathered, where the thread's wake-up is shared by
// many.
void TcpWriter::post(std::span<const std::uint8_t> request, Deadline deadline) {
  check();
  const bool large = request.size() > kMostGathered;
  if (in_a_row_ < kGatherAfter || large) {
    const int before = in_a_row_;
    send(request, deadline);
    in_a_row_ = large ? 0 : before + 1;
    return;
  }
  gather(request, deadline);
}

void TcpWriter::gather(std::span<const std::uint8_t> request, Deadline deadline) {
  if (!thread_) thread_ = std::make_unique<base::Thread>("ls-store-write", [this] { write_gathered(); });
  base::MutexLock lock(mutex_);
  if (failure_) base::raise(*failure_);
  if (gathered_.size() + request.size() > kMostGathered) {
    await_thread(deadline);
    // The thread has not come to it yet.
    if (gathered_.size() + request.size() > kMostGathered) {
      channel_.write_all(gathered_, deadline);
      gathered_.clear();
    }
  }
  const bool first = gathered_.empty();
  gathered_.insert(gathered_.end(), request.begin(), request.end());
  deadline_ = deadline;
  lock.unlock();
  if (first) something_.notify_one();
}

// Writes without the lock, so that post() can gather the next batch meanwhile. `sending_` keeps everybody
// else off the channel. A failure is kept for the next call, since nobody waits here.
void TcpWriter::write_gathered() {
  base::MutexLock lock(mutex_);
  for (;;) {
    something_.wait(mutex_, [this]() LOCKSTEP_REQUIRES(mutex_) { return stop_ || !gathered_.empty(); });
    if (stop_) return;
    std::swap(batch_, gathered_);
    sending_ = true;
    const Deadline deadline = deadline_;
    lock.unlock();
    std::optional<Failure> failure;
    try {
      channel_.write_all(batch_, deadline);
    } catch (const std::exception&) {
      failure = base::current_failure();
    }
    batch_.clear();
    lock.lock();
    sending_ = false;
    if (failure) failure_ = failure;
    if (failure) stop_ = true;
    sent_.notify_all();
  }
}

}  // namespace lockstep::internal
