// A transport between workers of one process, through memory: for tests, above all of schedules. The exchange
// chooses what is delivered next; with a seed, at random.
// Thread safety: as Transport. Ownership: transports share the exchange.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/transport/transport.h"

namespace lockstep::transport {

struct InProcessOptions {
  // Not zero: what is polled next is drawn at random from everything that waits for a worker, in
  // whatever order it was sent; and with a chance of hold_back in 1024 poll finds nothing although something
  // waits.
  std::uint64_t seed = 0;
  unsigned hold_back = 0;
  // Messages for which it returns true are dropped. May be empty.
  std::function<bool(WorkerId from, WorkerId to, const Message& message)> lose{};
};

class InProcessExchange final : public std::enable_shared_from_this<InProcessExchange> {
 public:
  static std::shared_ptr<InProcessExchange> create(InProcessOptions options = {});

  // The transport of worker `id`. Raises kUsage when it already exists.
  std::unique_ptr<Transport> join(WorkerId id);
  // As if its process was killed: all others are notified, what it sent is lost, its own transport delivers
  // nothing more.
  void kill(WorkerId id, const std::string& cause);

 private:
  friend class InProcessTransport;
  // Every field is accessed under the exchange's mutex_, which a nested struct cannot name in an annotation.
  struct Box {
    std::deque<Event> events;
    bool ringing = false;
    bool gone = false;
    base::ConditionVariable bell;
  };
  // What becomes of messages that it sent and nobody has polled.
  enum class Unread : std::uint8_t { kArrives, kIsLost };
  explicit InProcessExchange(InProcessOptions options)
      : options_(std::move(options)), random_(options_.seed) {}

  std::optional<Failure> send(WorkerId from, WorkerId to, Message message);
  std::optional<Event> poll(WorkerId id);
  void end(WorkerId id, const std::string& cause, Unread unread);
  void tell_loss(WorkerId id, const std::string& cause, Unread unread) LOCKSTEP_REQUIRES(mutex_);

  const InProcessOptions options_;
  base::Mutex mutex_;
  std::mt19937_64 random_ LOCKSTEP_GUARDED_BY(mutex_);
  // Of workers that have joined; a thread in wait() holds its own.
  std::map<WorkerId, std::shared_ptr<Box>> boxes_ LOCKSTEP_GUARDED_BY(mutex_);
  // (observer, subject): the observer has been notified of the subject's loss or leave.
  std::set<std::pair<WorkerId, WorkerId>> apart_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::transport
