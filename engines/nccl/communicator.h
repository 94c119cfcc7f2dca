// One rank's end of a group over NCCL.
//
// Who does what. A caller's thread issues its collective itself when nothing is ahead of it: run in the caller's own stream,
// post in the lane's. Everything else is the progress thread's: it connects, issues what is queued, matches messages,
// collects what has completed, watches deadlines and peers, and ends what cannot complete. It is started when there is
// something to do and returns a moment after there is nothing: an idle communicator has no thread.
//
// Failure. The first one breaks the communicator on every rank: it is told to the others (peers.h), NCCL is revoked so that
// streams continue within milliseconds, and when the device is quiet every pending operation ends with it.
//
//   intact --break_with(): first failure--> stopped: the progress thread winds down; later operations end with it
//      '-----leave()-----------------------> stopped with kAborted, told as an orderly leave or as a lost peer; lanes close
//
// Graphs. An operation that was captured runs whenever its graph does, without this class knowing: it has no deadline. From
// the first capture on the progress thread stays and watches the peers, so that a graph does not wait for a dead one.
//
// Lock order: news_mutex_, then mutex_; a lane's and an operation's lock are taken under none of them, or under mutex_ for
// a moment. `done` runs under no lock. Thread safety: all methods, any thread, except for the destructor.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engines/nccl/lane.h"
#include "engines/nccl/messages.h"
#include "lockstep/base/detail/forks.h"

namespace lockstep::nccl_plugin {

class Communicator {
 public:
  // Collective; blocks until the deadline in `config` at most. Raises kUnsupported without a driver or NCCL, kUsage for
  // options, and what Peers raises.
  explicit Communicator(const lockstep_comm_config& config);
  // Pre: wait_closed() was true.
  ~Communicator();
  Communicator(const Communicator&) = delete;

  int rank() const { return peers_.rank(); }
  int size() const { return peers_.size(); }
  // False in a forked child, where nothing of it may be used: NCCL and CUDA do not survive fork.
  bool made_here() const { return static_cast<bool>(made_here_); }

  // Raises kAborted after leave, kUsage for another device, kResource. On a broken communicator the operation ends soon.
  OperationPtr post(const lockstep_op& op);
  // Device memory: returns when op.stream is ordered after the operation; a barrier of the host: when it has completed. Raises
  // its failure.
  void run(const lockstep_op& op);
  // True when it is over, false at the deadline.
  bool wait(Operation& operation, std::int64_t deadline_ns);
  // The order of the ABI's stream_wait. Raises the operation's failure when it is known.
  void stream_wait(Operation& operation, void* stream);

  void abort(const std::string& reason);
  // Without a cause an orderly leave; with one the others see a lost peer. Returns at once.
  void leave(const char* cause);
  std::optional<Failure> failure();

  // After leave(): waits until NCCL's communicators are freed. False: they are stuck, and so is the thread that frees them.
  bool wait_closed(Deadline deadline);
  void log(int level, const std::string& text) const { peers_.store().log(level, text); }

 private:
  // Of the GPU that this rank uses; made when that is known.
  struct Gpu {
    Gpu(const LaneContext& with, std::vector<int> all)
        : context(with), collectives(context, "all", std::move(all)) {}
    const LaneContext context;
    Lane collectives;
    // Sender and receiver, of messages; owned by the progress thread.
    std::map<std::pair<int, int>, std::unique_ptr<Lane>> messages;
  };

  void await_connected(Gpu& gpu, Deadline deadline);

  // ---- calls
  Gpu& bind(const lockstep_op& op);
  Gpu& bind(int device);
  int device_for(const lockstep_op& op) const;
  OperationPtr make(const lockstep_op& op);
  void add(const OperationPtr& operation);
  // Queues it behind what was posted before. Pre: added.
  void enqueue(const OperationPtr& operation, Gpu& gpu);
  void run_in_stream(const OperationPtr& operation, Gpu& gpu);
  void run_captured(const lockstep_op& op, Gpu& gpu);
  void await_issued(Operation& operation);
  [[noreturn]] void raise_failure();

  // ---- progress (progress.cpp)
  // Starts the thread if none runs, and wakes it up.
  void kick();
  void ensure_thread() LOCKSTEP_REQUIRES(mutex_);
  void serve();
  // One round; returns whether anything happened.
  bool step();
  bool step_messages(Gpu& gpu, bool slow);
  void queue_message(Gpu& gpu, const OperationPtr& operation, bool pair);
  bool pump_lanes(Gpu& gpu);
  void check_times();
  void check_peers(bool slow);
  void check_left();
  // The thread's sleep after a round; false when it should return.
  bool rest(bool moved);
  void complete(const OperationPtr& operation, const std::optional<Failure>& failure);
  std::string waits_for(const Operation& operation) const;

  // ---- ending (ending.cpp)
  void break_with(Failure failure);
  // What the driver or NCCL threw, in a catch block, as a failure of this communicator.
  Failure explain() const;
  void wind_down();
  void end_pending();
  void close_lanes();

  const base::MadeHere made_here_;
  const std::string name_;
  const Library& nccl_;
  const cuda::Driver& driver_;
  const Options options_;
  Peers peers_;

  std::atomic<bool> stopped_{false};  // set after failure_
  std::atomic<bool> leaving_{false};
  std::atomic<bool> captured_{false};
  std::atomic<Gpu*> gpu_now_{nullptr};  // gpu_, without the lock

  base::Mutex news_mutex_;  // of peers_.news()

  // Of the progress thread.
  Messages messages_;
  bool wound_down_ = false, orderly_ = false;
  std::int64_t next_check_ns_ = 0, next_store_ns_ = 0, next_slow_ns_ = 0, idle_since_ns_ = 0;
  std::int64_t pause_ns_ = 0;

  mutable base::Mutex mutex_;
  base::ConditionVariable changed_;  // for the thread: kicked_; for wait_closed(): closed_
  std::unique_ptr<Gpu> gpu_ LOCKSTEP_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ LOCKSTEP_GUARDED_BY(mutex_);
  std::list<OperationPtr> pending_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<OperationPtr> posted_messages_ LOCKSTEP_GUARDED_BY(mutex_);
  std::uint64_t called_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // collectives
  std::uint64_t completed_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  bool kicked_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool serving_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool left_in_order_ LOCKSTEP_GUARDED_BY(mutex_) = false;  // and not broken before
  bool closed_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  base::Thread thread_ LOCKSTEP_GUARDED_BY(mutex_);  // "ls-nccl"
};

}  // namespace lockstep::nccl_plugin
