// What the collectives need from a group, independent of its implementation: start an operation, allocate
// memory, close. For collective/.
// Thread safety: every method may be called from any thread; operations: see process_group.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/engine/engine.h"
#include "lockstep/group/detail/group_factory.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace at {
struct RecordFunction;
}

namespace lockstep::internal {

// An operation as its caller described it. The ops lack only the deadline, the caller's line and the
// completion callback.
struct OperationRequest {
  const char* name;  // "all_reduce"; static
  std::source_location where;
  std::optional<Milliseconds> timeout;  // unset: the group's
  std::optional<Deadline> deadline{};  // of the whole call, when this is a part of it; instead of the timeout
  lockstep_op op{};
  std::vector<lockstep_op> more{};  // further ops under the same Work, after `op`; post only
  // Of an operation on device memory the stream that it is ordered after, which its ops name, too.
  std::optional<c10::Stream> stream{};
  // `type` is the caller's; run() and post() fill in the rest.
  Work::Ended ended{};
  // For the debug wrapper and the profiler, filled only when the group checks_calls() or a profiler is
  // active: the caller's tensors, and whether their shapes may differ between ranks (coalesced, all_to_all,
  // uneven all_gather and reduce_scatter).
  std::vector<at::Tensor> described{};
  bool shapes_may_differ = false;
};

// The tensors of an operation, kept alive until it has completed.
struct HeldTensors {
  std::vector<at::Tensor> buffers{};  // what the engine reads and writes
  std::vector<at::Tensor> results{};  // what Work::result() gives
  // Temporaries to copy into the caller's tensors once, when the operation succeeded: (to, from), in this
  // order.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies{};
  // Further work at that point, before the copies; may be null.
  std::function<void()> finish{};
  // Results that share memory, each with the value it must hold after the copies; kUsage when two differ and
  // one was lost.
  std::vector<std::pair<at::Tensor, at::Tensor>> shared{};
  // The profiler's event, ended with the operation; null when no profiler is active.
  std::shared_ptr<at::RecordFunction> event{};

  // Runs finish and the copies, not recorded by autograd. Raises when `shared` results were lost.
  void copy_back();
};

class GroupBase : public ProcessGroup {
 public:
  explicit GroupBase(GroupIdentity identity);

  int rank() const final { return identity_.rank; }
  int size() const final { return is_member() ? static_cast<int>(identity_.members.ranks().size()) : -1; }
  const std::vector<int>& ranks() const final { return identity_.members.ranks(); }
  const std::string& name() const final { return identity_.name; }
  std::string desc() const final;
  void set_desc(std::string desc) final;
  Milliseconds timeout() const final { return identity_.shared->timeout; }
  void set_timeout(Milliseconds timeout) final;
  std::shared_ptr<Store> store() const final { return identity_.store; }
  std::uint64_t sequence_number() const final { return identity_.shared->sequence; }
  void enable_collectives_timing() final { identity_.shared->timing = true; }
  bool collectives_timing() const final { return identity_.shared->timing; }
  void register_on_completion_hook(CompletionHook hook) final;
  std::string backend_config() const override;

  // Closes permanently: was_left() is true from then on.
  void leave(const std::string& cause) {
    shared().left = true;
    close(cause);
  }
  bool was_left() const { return shared().left; }
  // The world it belongs to, also after that was destroyed; null for a non-member's handle.
  const std::shared_ptr<const WorldInfo>& world() const { return identity_.world; }
  // False for the handle of a group that this rank is not a member of: operations on it warn and do nothing.
  bool is_member() const { return identity_.rank >= 0; }
  // Rank in this group of a rank of the world; -1 when it is not a member. Cheap.
  int group_rank_of(int world_rank) const noexcept { return identity_.members.index_of(world_rank); }
  // The part of the group that serves tensors of this device type; null when it has no back end for it.
  // `this` for a group of one back end. Lives as long as the group.
  virtual GroupBase* for_device(c10::DeviceType type) noexcept {
    return devices_.test(static_cast<std::size_t>(type)) ? this : nullptr;
  }

  // Assigns the request its sequence number. Collectives are numbered identically on all ranks, since all
  // make the same calls; messages, which only two ranks know of, are numbered separately. The engine compares
  // the numbers of collectives.
  void number(OperationRequest& request) {
    const bool message = request.op.kind == LOCKSTEP_SEND || request.op.kind == LOCKSTEP_RECV;
    auto& counter = message ? shared().n_messages : shared().sequence;
    request.ended.sequence_number = counter.fetch_add(1, std::memory_order_relaxed) + 1;
    if (message) return;
    request.op.tag = static_cast<std::int32_t>(request.ended.sequence_number & 0x7FFFFFFF);
    for (auto& op : request.more) op.tag = request.op.tag;
  }
  // A collective was refused before it got a number. It takes one nevertheless: ranks that all refuse it stay
  // in step, and when only one rank refuses it, the number of its next collective reveals this to all of
  // them.
  void refused(const OperationRequest& request);
  // Adds what was refused before it to the next collective's line, for the messages of all ranks. `where` has
  // kWhereCapacity.
  void add_refusal(char* where) const;

  // How often a breakpoint() of this line was reached in this group, this time included.
  int count_hit(const std::string& where) {
    const std::lock_guard lock(shared().mutex);
    return ++shared().hits[where];
  }
  // The number of the next monitored barrier.
  std::uint64_t next_gather() { return identity_.shared->n_gathers++; }

  // True when every collective is compared between ranks before it runs: its OperationRequest must be
  // described.
  virtual bool checks_calls() const { return false; }

  // Runs request.op to completion on this thread, fills in request.ended and returns its number; raises its
  // error. On device memory it returns when request.stream is ordered after the operation, and raises what is
  // known by then.
  virtual std::uint64_t run(OperationRequest& request) = 0;
  // Starts all of the request's ops; the Work holds the tensors. Raises when the group is broken or closed.
  virtual Work post(OperationRequest& request, HeldTensors held) = 0;
  // Null in a group of one, which performs every operation locally.
  virtual const comm::Engine* engine() const = 0;
  // The group's communicator over that engine; null when it has none or is closed.
  virtual std::shared_ptr<comm::Communicator> communicator(const comm::Engine& engine) const = 0;
  // Memory that the engine reduces in place, on the device; null when the engine provides none.
  virtual std::shared_ptr<void> allocate(std::size_t n_bytes, c10::Device device) = 0;
  // Leaves, once: waits for operations in flight, then notifies the others. An empty cause is an orderly
  // leave.
  virtual void close(const std::string& cause) = 0;

 protected:
  const GroupIdentity& identity() const { return identity_; }
  GroupShared& shared() const { return *identity_.shared; }

 private:
  const GroupIdentity identity_;
  std::bitset<c10::COMPILE_TIME_MAX_DEVICE_TYPES> devices_;  // constant after construction
};

// `group`, or the default group when null; raises kUsage when there is none or it is not a GroupBase.
std::shared_ptr<GroupBase> resolve(const Group& group);
// As resolve, for queries: also raises kUsage for a group that was left. `what` is the name of the caller's
// function.
std::shared_ptr<GroupBase> still_there(const Group& group, const char* what);
// The same ranks of the same world; null is the default group. Equal ranks of two worlds may be different
// processes.
bool have_same_members(const Group& a, const Group& b);
// Raises the timeout of every group of this rank's worlds to at least this.
void raise_world_timeouts(Milliseconds timeout);
// When the operation must have completed.
Deadline deadline_of(const OperationRequest& request, const GroupBase& group);

// kUsage: `what` was called on a group that was left.
[[noreturn]] void raise_closed(const char* what, const std::string& group);

}  // namespace lockstep::internal
