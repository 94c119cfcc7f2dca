// One rank's end of a group over gloo.
//
// Driving. Collectives of a communicator run one after the other, on the thread inside run() when nothing is
// queued, otherwise on a pool thread that drains the queue and returns. SEND and RECV start in post, in the
// order posted; those of one peer, tag and direction also complete in that order, on a pool thread while
// there are any. An idle communicator has no thread.
//
// Failure. The first one breaks the group permanently: local operations are woken, the message is written to
// the key-value space, and every connection is shut down, upon which the other ranks read it there. A rank
// that dies is detected by each of the others directly, since all are connected.
//
//   intact --break_with(): first failure--> broken: tear_down() publishes it, then shuts the connections down
//      '-----leave(): orderly-------------> left: the key "left/<rank>" tells a hang-up from a loss
//
// Lock order: the watch's lock (its callbacks run under it), start_mutex_ or connect_mutex_; then mutex_.
// Only connect_mutex_ is held while something blocks: connecting. `done` runs under no lock. Thread safety:
// all methods, any thread, except for the destructor.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engines/gloo/mailbox.h"
#include "engines/gloo/operation.h"
#include "engines/gloo/runtime.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::gloo_plugin {

// What ranks publish about themselves when they join.
struct Member {
  std::int64_t pid = -1;
  std::string host;  // host_identity
  std::string key;   // unguessable; proves on a connection that its other end read the key-value space
};

class Communicator {
 public:
  // Collective; blocks until the deadline in `config` at most. Raises Error.
  explicit Communicator(const lockstep_comm_config& config);
  // Leaves, if leave() was not called, and waits for what is under way to end. No other call may be under
  // way.
  ~Communicator();
  Communicator(const Communicator&) = delete;

  // Raises Error after leave, and when there is no thread for it. On a broken communicator the operation ends
  // at once.
  std::shared_ptr<Operation> post(const lockstep_op& op);
  // Raises Error when it fails.
  void run(const lockstep_op& op);
  // True when it is over, false at the deadline. A slow wait logs one line.
  bool wait(Operation& operation, std::int64_t deadline_ns);

  void abort(const std::string& reason);
  // Without a cause an orderly leave; with one the others see a lost peer.
  void leave(const char* cause);
  std::optional<Failure> failure() const { return stop_source_.failure(); }
  int size() const { return size_; }

 private:
  // ---- joining (join.cpp)
  void meet(std::int64_t deadline_ns);
  void listen(std::int64_t deadline_ns);
  void connect(std::int64_t deadline_ns);
  void connect_to(int peer, const std::string& addresses);
  std::vector<sockaddr_storage> greet(Connections& connections);
  void watch_over(const Connections& connections);
  // What all ranks wrote under `what`, by rank. For rank 0, which relays it.
  std::vector<std::string> read_all(const char* what, std::int64_t deadline_ns);
  // What rank 0 relays under `key`, made of what all ranks wrote under `what`.
  std::string read_relayed(const std::string& key, const char* what, std::int64_t deadline_ns);
  // Nothing at the deadline. Logs slow_text(), if given, when the wait is slow.
  std::optional<std::string> read(const std::string& key, std::int64_t deadline_ns,
                                  const std::function<std::string()>& slow_text = {});
  // The first of the others that has not written under `what`; 0 when all have.
  int first_missing(const char* what);
  void write(const std::string& key, const std::string& value);
  [[noreturn]] void raise_missing(int peer);
  // The first operation of a communicator that connects lazily. Breaks the group when it fails, and raises
  // why.
  void connect_for(Operation& operation);

  // ---- point to point (point_to_point.cpp)
  // Messages that gloo delivers in the order posted: kind, peer, tag.
  using Stream = std::tuple<int, int, int>;
  void start(Operation& operation) LOCKSTEP_REQUIRES(start_mutex_);
  void finish(Operation& operation);
  int receive_from_any(Operation& operation);
  void start_backlog();
  // Starts it and queues it for its stream to finish; otherwise returns what was thrown, for give_up. Pre:
  // connected or broken.
  std::exception_ptr start_and_queue(const std::shared_ptr<Operation>& operation)
      LOCKSTEP_REQUIRES(start_mutex_);
  // Ends an operation that could not start, and the group with it. May block, to find out why.
  void give_up(const std::shared_ptr<Operation>& operation, const std::exception_ptr& thrown);
  void queue_message(const std::shared_ptr<Operation>& operation);
  void drain_stream(const Stream& stream);
  void post_to_self(const std::shared_ptr<Operation>& operation);
  using Match = std::pair<std::shared_ptr<Operation>, std::shared_ptr<Operation>>;
  void drain_matches();
  std::optional<Failure> copy_to_self(const Match& match);
  void end_messages_to_self() noexcept;
  void end(const std::list<std::shared_ptr<Operation>>& operations);

  // ---- operations
  void wait_until_idle();
  void post_message(const std::shared_ptr<Operation>& operation);
  void post_to_backlog(const std::shared_ptr<Operation>& operation) LOCKSTEP_REQUIRES(start_mutex_);
  void post_collective(const std::shared_ptr<Operation>& operation);
  // Pre: nobody drives.
  void start_draining() LOCKSTEP_REQUIRES(mutex_);
  bool try_drive();
  void stop_driving();
  void drain();
  // Runs or finishes it on this thread, and gives how it ended. Sees to its deadline.
  std::optional<Failure> perform(Operation& operation);
  void complete(const std::shared_ptr<Operation>& operation, const std::optional<Failure>& failure);
  // lasted_ns: when to log that it is slow, where it blocks its caller.
  void arm(Operation& operation, std::int64_t lasted_ns = LOCKSTEP_NEVER);
  void timed_out(const Operation& operation);
  void log_line(const std::string& line) const;
  std::string slow_text(const Operation& operation) const;
  std::string waits_for(const Operation& operation) const;
  std::string context(const Operation& operation) const;
  // Runs `task` on the pool; the destructor waits for it.
  void spawn(std::function<void()> task);

  // ---- failure (loss.cpp)
  enum class Verdict : std::uint8_t { kLeft, kBroken };
  void break_with(Failure failure);
  void tear_down(const Failure& failure);
  void hung_up(int peer);
  // Finds out why a peer's connection ended. Breaks the group unless the peer left in order.
  Verdict judge(int peer);
  Failure failure_of(const PairFailed& failed, const Operation& operation);
  // The exception being handled, as the failure of `operation`. May block as judge does.
  Failure current_failure(const Operation& operation);
  void note_gone(int peer);
  Failure nobody_left(int peer) const;
  std::optional<std::string> look(const std::string& key, bool* published = nullptr);
  std::string who(int peer) const;

  // Constant after construction.
  const int rank_, size_;
  const std::string name_;
  const lockstep_host* const host_;
  const std::shared_ptr<Runtime> runtime_;
  const bool lazy_;
  std::vector<Member> members_;

  StopSource stop_source_;
  std::vector<std::unique_ptr<Connections>> connections_;  // constant after construction
  base::Mutex connect_mutex_;                              // held while connecting
  std::atomic<bool> connected_{false};
  std::atomic<int> connecting_to_{-1};
  std::unique_ptr<Mailbox> mailbox_;  // set when connected; then of whoever drives
  std::vector<Watch::Id> watched_;    // set when connected
  std::uint64_t sequence_ = 0;        // of whoever drives
  std::atomic<bool> left_{false};
  std::atomic<bool> all_joined_{false};  // a peer that had joined broke the group while we were connecting
  std::atomic<int> wait_for_any_{0};     // receives that any peer may end

  base::Mutex start_mutex_;  // orders SEND and RECV
  std::deque<std::shared_ptr<Operation>> backlog_ LOCKSTEP_GUARDED_BY(start_mutex_);
  // Last one used, per receiver.
  std::vector<std::uint64_t> data_slots_ LOCKSTEP_GUARDED_BY(start_mutex_);

  mutable base::Mutex mutex_;
  base::ConditionVariable idle_;
  std::deque<std::shared_ptr<Operation>> queue_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<Stream, std::deque<std::shared_ptr<Operation>>> streams_ LOCKSTEP_GUARDED_BY(mutex_);
  // Sends and receives of this rank with itself that wait for the other.
  std::list<std::shared_ptr<Operation>> to_self_ LOCKSTEP_GUARDED_BY(mutex_);
  std::deque<Match> matches_ LOCKSTEP_GUARDED_BY(mutex_);  // of them: have found each other, in order
  bool driven_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  int tasks_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::vector<bool> gone_ LOCKSTEP_GUARDED_BY(mutex_);  // peers that left in order
};

}  // namespace lockstep::gloo_plugin
