#include "engines/gloo/transfer.h"

#include <vector>

namespace lockstep::gloo_plugin {
namespace {

// Deadlines are enforced by the watch: a wait that timed out inside gloo would close every pair before the
// reason is published.
constexpr std::chrono::milliseconds kForEver{std::chrono::hours(24 * 365)};

template <class F>
// gloo reports every trouble of a pair as an exception of its own types; a failure of this plug-in passes
// unchanged.
auto guarded(int peer, F&& call) {
  try {
    return call();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw PairFailed{peer, error.what()};
  }
}

}  // namespace

// Under the mutex: a transfer that enters afterwards finds stop_ and throws, one that entered before is
// woken. None can slip through.
bool StopSource::stop_with(Failure failure, bool failed) {
  const base::MutexLock lock(mutex_);
  if (stop_) return false;
  stop_ = std::move(failure);
  failed_ = failed;
  for (auto* buffer : buffers_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
  return true;
}

bool StopSource::break_with(Failure failure) {
  return stop_with(std::move(failure), true);
}

bool StopSource::close(Failure failure) {
  return stop_with(std::move(failure), false);
}

std::optional<Failure> StopSource::failure() const {
  const base::MutexLock lock(mutex_);
  return failed_ ? stop_ : std::nullopt;
}

std::optional<Failure> StopSource::stop() const {
  const base::MutexLock lock(mutex_);
  return stop_;
}

void StopSource::check() const {
  if (auto failure = stop()) throw Error(std::move(*failure));
}

void StopSource::enter(gloo::transport::UnboundBuffer* buffer) {
  const base::MutexLock lock(mutex_);
  if (stop_) throw Error(*stop_);
  buffers_.insert(buffer);
}

void StopSource::leave(gloo::transport::UnboundBuffer* buffer) {
  const base::MutexLock lock(mutex_);
  buffers_.erase(buffer);
}

Transfer::Transfer(StopSource& stop_source, Connections& connections, const void* memory, std::size_t n_bytes)
    // gloo has one kind of buffer for both ways; it never writes into one that is only sent from.
    : stop_source_(stop_source), buffer_(connections.buffer(const_cast<void*>(memory), n_bytes)) {
  stop_source_.enter(buffer_.get());
}

// Out of the set before the buffer is destroyed: stop_with() aborts only buffers that exist.
Transfer::~Transfer() {
  stop_source_.leave(buffer_.get());
}

void Transfer::send(int to, std::uint64_t slot, std::size_t offset, std::size_t n_bytes) {
  guarded(to, [&] { buffer_->send(to, slot, offset, n_bytes); });
}

void Transfer::recv(int from, std::uint64_t slot, std::size_t offset, std::size_t n_bytes) {
  guarded(from, [&] { buffer_->recv(from, slot, offset, n_bytes); });
}

void Transfer::recv_from_any(int size, int but, std::uint64_t slot) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) {
    if (r != but) ranks.push_back(r);
  }
  guarded(-1, [&] { buffer_->recv(ranks, slot, 0, buffer_->size); });
}

// gloo returns false when the wait was aborted, which only stop_with() does.
void Transfer::wait_send(int to) {
  if (!guarded(to, [&] { return buffer_->waitSend(nullptr, kForEver); })) stop_source_.check();
}

int Transfer::wait_recv(int from) {
  int rank = from;
  if (!guarded(from, [&] { return buffer_->waitRecv(&rank, kForEver); })) stop_source_.check();
  return rank;
}

}  // namespace lockstep::gloo_plugin
