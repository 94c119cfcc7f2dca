// One rank's end of a group over gloo.
//
// Driving. Collectives of a communicator run one after the other, on the thread inside run() when nothing is queued, or
// on a thread of the pool that drains the queue and goes. SEND and RECV start in post, in the order posted; those of one
// peer, tag and direction also end in that order, on a thread of the pool while there are any. An idle communicator has
// no thread.
//
// Failure. The first one breaks the group for good: local operations are woken, the words go into the key-value space,
// and every connection is shut down, which tells the other ranks to look there. A rank that dies is seen by each of the
// others directly, since all are connected. Thread safety: all methods, any thread, but for the destructor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engines/gloo/mailbox.h"
#include "engines/gloo/operation.h"
#include "engines/gloo/runtime.h"

namespace lockstep::gloo_plugin {

// What ranks publish about themselves when they join.
struct Member {
  std::int64_t pid = -1;
  std::string host;   // host_identity
  std::string token;  // unguessable; proves on a connection that its other end read the key-value space
};

class Communicator {
 public:
  // Collective; blocks until the deadline in `config` at most. Raises Error.
  explicit Communicator(const lockstep_comm_config& config);
  // Leaves, if leave() was not called, and waits for what is under way to end. No other call may be under way.
  ~Communicator();
  Communicator(const Communicator&) = delete;

  // Raises Error after leave, and when there is no thread for it. On a broken communicator the operation ends at once.
  std::shared_ptr<Operation> post(const lockstep_op& op);
  // Raises Error when it fails.
  void run(const lockstep_op& op);
  // True when it is over, false at the deadline. A wait that lasts says so.
  bool wait(Operation& operation, std::int64_t deadline_ns);

  void abort(const std::string& reason);
  // Without a cause an orderly leave; with one the others see a lost peer.
  void leave(const char* cause);
  std::optional<Failure> failure() const { return bond_.failure(); }
  int size() const { return size_; }

 private:
  // ---- joining (join.cpp)
  void meet(std::int64_t deadline_ns);
  void listen(std::int64_t deadline_ns);
  void connect(std::int64_t deadline_ns);
  void connect_to(int peer, const std::string& addresses);
  std::vector<sockaddr_storage> greet(Mesh& mesh);
  void watch_over(const Mesh& mesh);
  // What all ranks wrote under `what`, by rank. For rank 0, which tells it on.
  std::vector<std::string> read_all(const char* what, std::int64_t deadline_ns);
  // What rank 0 told on under `key`, made of what all ranks wrote under `what`.
  std::string hear(const std::string& key, const char* what, std::int64_t deadline_ns);
  // Nothing at the deadline. Says slow_words(), where there are any, when it lasts.
  std::optional<std::string> read(const std::string& key, std::int64_t deadline_ns,
                                  const std::function<std::string()>& slow_words = {});
  // The first of the others that has not written under `what`; 0 when all have.
  int first_missing(const char* what);
  void write(const std::string& key, const std::string& value);
  [[noreturn]] void raise_missing(int peer);
  // The first operation of a communicator that connects lazily. Breaks the group when it fails, and raises why.
  void connect_for(Operation& operation);

  // ---- point to point (point_to_point.cpp)
  // Messages that gloo delivers in the order posted: kind, peer, tag.
  using Stream = std::tuple<int, int, int>;
  void start(Operation& operation);
  void finish(Operation& operation);
  int receive_from_any(Operation& operation);
  void start_backlog();
  // Starts it and lets its stream finish it; or gives what was thrown, for give_up. Pre: start_mutex_ held, connected or
  // broken.
  std::exception_ptr start_and_queue(const std::shared_ptr<Operation>& operation);
  // Ends an operation that could not start, and the group with it. May block, to find out why.
  void give_up(const std::shared_ptr<Operation>& operation, const std::exception_ptr& thrown);
  void queue_message(const std::shared_ptr<Operation>& operation);
  void drain_stream(const Stream& stream);
  void post_to_self(const std::shared_ptr<Operation>& operation);
  void end_messages_to_self();

  // ---- operations
  void wait_until_idle();
  void post_message(const std::shared_ptr<Operation>& operation);
  void post_to_backlog(const std::shared_ptr<Operation>& operation);
  void post_collective(const std::shared_ptr<Operation>& operation);
  void start_draining();
  bool try_drive();
  void stop_driving();
  void drain();
  // Runs or finishes it on this thread, and gives how it ended. Sees to its deadline.
  std::optional<Failure> perform(Operation& operation);
  void complete(const std::shared_ptr<Operation>& operation, const std::optional<Failure>& failure);
  // lasted_ns: when to say that it lasts, where it blocks its caller.
  void arm(Operation& operation, std::int64_t lasted_ns = LOCKSTEP_NEVER);
  void timed_out(const Operation& operation);
  void say(const std::string& line) const;
  std::string slow_words(const Operation& operation) const;
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

  Bond bond_;
  std::vector<std::unique_ptr<Mesh>> meshes_;  // constant after construction
  std::mutex connect_mutex_;                   // held while connecting
  std::atomic<bool> connected_{false};
  std::atomic<int> connecting_to_{-1};
  std::unique_ptr<Mailbox> mail_;   // set when connected; then of whoever drives
  std::vector<Watch::Id> watched_;  // set when connected
  std::uint64_t sequence_ = 0;      // of whoever drives
  std::atomic<bool> left_{false};
  std::atomic<bool> all_joined_{false};  // a peer that had joined broke the group while we were connecting
  std::atomic<int> wait_for_any_{0};     // receives that any peer may end

  std::mutex start_mutex_;  // orders SEND and RECV; guards the next two
  std::deque<std::shared_ptr<Operation>> backlog_;
  std::vector<std::uint64_t> data_slots_;  // last one used, per receiver

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable idle_;
  std::deque<std::shared_ptr<Operation>> queue_;
  std::map<Stream, std::deque<std::shared_ptr<Operation>>> streams_;
  std::deque<std::shared_ptr<Operation>>
      to_self_;  // sends and receives of this rank with itself that wait for the other
  bool driven_ = false;
  int tasks_ = 0;
  std::vector<bool> gone_;  // peers that left in order
};

}  // namespace lockstep::gloo_plugin
