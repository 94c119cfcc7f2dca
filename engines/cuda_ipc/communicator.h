// One rank's end of a group.
//
// A collective, host-launched. Each rank's post writes what it called into the control page and makes its stream write
// "ready" there. Rank 0 is the leader: its progress thread compares the calls when all are there, and when all streams are
// ready it launches one kernel that reads the buffers of all ranks and writes them, followed by "done". Nothing waits in a
// stream until a rank asks for it (stream_wait), since a stream that waits beside others that compute costs time slices.
//
//   rank r, caller          the control page          leader, progress thread
//   post: Call k -------->  call[r][k]  ----------->  all there: compare
//         stream: ready ->  ready[r][k] ----------->  all there: launch, then stream: done
//   stream_wait:            done[k]     <-----------
//     stream waits <------
//
// A stream must never wait for work that its own process has yet to submit: calls that wait for idle streams (loading a
// kernel, freeing memory) would then never return. So in the leader's process stream_wait waits on the host until the
// kernel was submitted; elsewhere it does not.
//
// A send is published in the sender's table of messages. The receiver's progress thread matches it and launches the copy.
//
// Threads. Callers post; everything afterwards is done by the progress thread (progress.h), which alone owns the queues.
// mutex_ guards what callers and it hand over; under it the driver is not called, because a call on a full stream blocks
// until the progress thread has moved.
// Thread safety: all methods, any thread, except for the destructor.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engines/cuda_ipc/control_page.h"
#include "engines/cuda_ipc/family.h"
#include "engines/cuda_ipc/operation.h"
#include "engines/cuda_ipc/progress.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::cuda_ipc {

class Communicator final : private Served, private Relative {
 public:
  // Collective; blocks until config.deadline_ns at most.
  Communicator(const lockstep_comm_config& config, Communicator* parent);
  // Leaves, if leave() was not called. Waits until no operation is under way on the device.
  ~Communicator();
  Communicator(const Communicator&) = delete;

  // Pre: the call is right (plugin.h). Never blocks on other ranks.
  std::shared_ptr<Operation> post(const lockstep_op& op);
  // True when it is over; false when the deadline passed first.
  bool wait(Operation& operation, Deadline deadline);
  // The failure, when it is known. Pre: the operation is on device memory.
  std::optional<Failure> stream_wait(Operation& operation, void* stream);

  void abort(const std::string& reason);
  void leave(const char* cause);
  std::optional<Failure> failure();

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  using OperationPtr = std::shared_ptr<Operation>;
  static constexpr int kLeader = 0;

  // ---- posting, on the caller's thread ----
  void bind(Operation& operation);
  void describe_buffers(Operation& operation);
  // False: it must be deferred.
  bool enqueue_collective(const OperationPtr& operation) LOCKSTEP_REQUIRES(mutex_);
  bool enqueue_message(const OperationPtr& operation) LOCKSTEP_REQUIRES(mutex_);
  bool publish_message(Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  void publish_call(Operation& operation);
  void announce(Operation& operation);

  // ---- the progress thread ----
  State serve(bool slow) noexcept override;
  bool advance(bool slow);
  void take_posted();
  bool publish_deferred();
  bool has_reached(const Operation& operation);
  bool complete_collectives();
  bool launch_collectives();
  // Whether the front of what is not launched has been, or can be.
  bool launch_next(Operation& own);
  bool all_called(std::uint64_t k);
  bool all_ready(std::uint64_t k);
  std::optional<Failure> compare(std::uint64_t k);
  std::optional<Failure> compare_counts(std::uint64_t k);
  std::vector<Launch> plan_collective(Operation& own);
  void* locate(DeviceState& device, int rank, int its_device, const MemoryRef& ref, std::uint64_t n_bytes);
  // True once the results are where the caller wants them.
  bool copied_back(Operation& operation);

  bool serve_sends();
  bool serve_receives();
  bool match(Operation& receive);
  bool match_from(Operation& receive, int source);
  bool take_message(Operation& receive, int source, std::size_t slot);
  bool launch_receive(Operation& receive);

  // ---- failure ----
  void check_slowly();
  void check_device(const Operation& operation);
  void check_collective(const Operation& operation);
  std::string awaited(const Operation& operation);
  void check_messages(std::list<OperationPtr>& list);
  std::optional<Failure> late_message(const Operation& operation);
  bool is_abandoned(const Operation& message);
  bool withdraw(Operation& operation);
  // Ends everything that can be ended; true when nothing is left.
  bool end_all();
  template <class List>
  void end_list(List& list, const Failure& reason);
  void finish_leaving();
  bool in_flight(const Operation& operation);
  Failure break_with(Failure failure) noexcept;
  Failure stop_reason() noexcept;
  void submitted(Operation& operation);
  void complete(Operation& operation, const Failure* failure) noexcept;
  bool has_left(int rank) { return page_->rank(rank).left.load(std::memory_order_acquire) != 0; }
  std::string who(int rank) const;
  std::int64_t pid(int rank) const { return member(rank).pid; }
  bool same_process(int rank) const { return rank == rank_ || member(rank).same_process; }
  const Family::Member& member(int rank) const {
    return family_->member(ranks_[static_cast<std::size_t>(rank)]);
  }

  // Relative.
  bool needs(int family_rank) override;
  void lost(int family_rank, const std::string& cause) override;
  const lockstep_host& host() override { return *host_; }
  int rank_of(int family_rank) override;

  // Constant after construction.
  const int rank_, size_;
  const std::string name_;
  const lockstep_host* const host_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<Family> family_;
  std::vector<int> ranks_;  // in the family
  std::shared_ptr<ControlPage> page_;

  // Synchronised by themselves.
  std::atomic<bool> leaving_{false};  // leave() was called
  std::atomic<bool> closed_{false};
  std::atomic<std::uint32_t> ended_{0};      // closed_, and nothing is left; a futex
  std::atomic<std::uint64_t> completed_{0};  // collectives, all up to this one
  std::atomic<std::uint32_t> n_deferred_sends_{0};

  base::Mutex mutex_;
  std::vector<OperationPtr> posted_ LOCKSTEP_GUARDED_BY(mutex_);
  std::uint64_t last_number_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::uint64_t last_message_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::vector<std::uint64_t> slot_numbers_ LOCKSTEP_GUARDED_BY(mutex_);  // the last message in each slot

  // Of the progress thread.
  std::deque<OperationPtr> collectives_;  // by number, without a gap
  std::list<OperationPtr> sends_, receives_, deferred_;
  std::uint64_t next_launch_ = 1, compared_ = 0;
  std::vector<std::uint64_t> published_;  // messages of each rank, as of this pass
  Deadline give_up_ = Deadline::never();  // when what is in flight is no longer waited for
};

}  // namespace lockstep::cuda_ipc
