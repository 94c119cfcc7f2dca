// Workers of one process that hand each other messages through memory: for tests, of schedules above all. The exchange
// decides what is delivered next; with a seed it shuffles.
// Thread safety: as Transport. Ownership: transports share the exchange.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>

#include "lockstep/transport/transport.h"

namespace lockstep::transport {

struct InProcessOptions {
  // Not zero: what is polled next is drawn at random from everything that waits for a worker, whoever sent it first, and
  // with this chance in 1024 poll finds nothing although something waits.
  std::uint64_t seed = 0;
  unsigned hold_back = 0;
  // Messages for which it returns true are lost on the way. May be empty.
  std::function<bool(WorkerId from, WorkerId to, const Message& message)> lose{};
};

class InProcessExchange final : public std::enable_shared_from_this<InProcessExchange> {
 public:
  static std::shared_ptr<InProcessExchange> create(InProcessOptions options = {});

  // The transport of worker `id`. Raises kUsage when there is one.
  std::unique_ptr<Transport> join(WorkerId id);
  // As if its process was killed: all others are notified, what it sent is lost, its own transport delivers nothing more.
  void kill(WorkerId id, const std::string& cause);

 private:
  friend class InProcessTransport;
  struct Box {
    std::deque<Event> events;
    bool ringing = false;
    bool gone = false;
    std::condition_variable bell;
  };
  // What it sent and nobody has polled.
  enum class Unread : std::uint8_t { kArrives, kIsLost };
  explicit InProcessExchange(InProcessOptions options)
      : options_(std::move(options)), random_(options_.seed) {}

  std::optional<Failure> send(WorkerId from, WorkerId to, Message message);
  std::optional<Event> poll(WorkerId id);
  void end(WorkerId id, const std::string& cause, Unread unread);
  void tell_loss(WorkerId id, const std::string& cause, Unread unread);

  const InProcessOptions options_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::mt19937_64 random_;
  std::map<WorkerId, std::shared_ptr<Box>>
      boxes_;  // of workers that are there; a thread in wait() holds its own
  std::set<std::pair<WorkerId, WorkerId>>
      apart_;  // (who, of whom): has been told of the loss, or of the leave
};

}  // namespace lockstep::transport
