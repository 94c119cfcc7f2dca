// One call of an operation on its way to the group: checks its tensors, finds what the engine calls their
// type, and starts it. Every message names the operation, the group, the rank and the caller's line. Private
// to collective/.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/group/detail/group_base.h"

namespace lockstep::internal {

// How the engine sees one element: `units` elements of `dtype`. Complex numbers are two reals; types the
// engine does not know are bytes.
struct Wire {
  lockstep_dtype dtype;
  std::int64_t units;
};

// What a CoalescingScope of this thread collects; null when there is none (coalescing.cpp).
class Batch;
extern thread_local constinit Batch* open_batch;
// Of this thread's open ones that of the group; null when there is none.
Batch* batch_of(const GroupBase& group);

class CollectiveCall {
 public:
  template <class Options>
  CollectiveCall(OpType type, const Options& options) : CollectiveCall(type, options, is_async(options)) {}
  // For what has no option of that name.
  template <class Options>
  CollectiveCall(OpType type, const Options& options, bool async)
      : group_(resolve(options.group)),
        async_(async),
        request_{.name = name_of(type), .where = options.where, .timeout = options.timeout} {
    request_.op.struct_size = sizeof(lockstep_op);
    request_.ended.type = type;
    if (request_.timeout && request_.timeout->count() <= 0) [[unlikely]]
      refuse_timeout();
  }

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  bool is_async() const { return async_; }
  const std::shared_ptr<GroupBase>& group() const { return group_; }
  lockstep_op& op() { return request_.op; }
  const OperationRequest& request() const { return request_; }

  // From now on: one deadline for all that this call starts.
  void hold_deadline() { request_.deadline = deadline_of(request_, *group_); }

  // What collects the operation instead of starting it; null outside a CoalescingScope.
  Batch* batch() const { return open_batch == nullptr ? nullptr : batch_of(*group_); }
  // False for a process that is not in the group, which logs that once per line of the program. Raises
  // kUsage inside a CoalescingScope of the group unless `collectable`.
  bool takes_part(bool collectable = false) const {
    if (open_batch != nullptr && !collectable) [[unlikely]]
      refuse_inside_batch();
    if (rank() >= 0) [[likely]]
      return true;
    warn_not_member();
    return false;
  }

  template <class... Parts>
  [[noreturn]] void refuse(ErrorKind kind, const Parts&... parts) const {
    if (rank() >= 0) group_->refused(request_);
    Failure failure{.kind = kind, .message = base::cat(prefix(), parts...)};
    report(failure);
    base::raise(std::move(failure));
  }

  // Defined, dense, on a device that the group serves, the same for all of the call. `role` is the argument's
  // name.
  void check(const at::Tensor& tensor, const char* role);
  // As check, for a tensor that is written: no two elements may share memory.
  void check_output(const at::Tensor& tensor, const char* role);
  // Same type as `other`; a complex type may stand for its real one.
  void check_same_type(const at::Tensor& tensor, const char* role, const at::Tensor& other) const;
  // One tensor per rank, each fit to be sent (or written), all of one type and that of `other`.
  void check_list(const std::vector<at::Tensor>& list, const char* role, const at::Tensor& other,
                  bool written);
  // Two tensors that are written share no memory, as far as a cheap check can tell.
  void check_apart(const at::Tensor& a, const char* role_a, const at::Tensor& b, const char* role_b) const;
  // The rank in the group that the caller named; raises kUsage where find_root() finds none.
  int root(std::optional<int> in_world, std::optional<int> in_group, const char* role,
           std::optional<int> fallback = {}) const;

  // Raises kUsage when the operation makes no sense for the type, kUnsupported when the engine cannot do it.
  Wire wire_for_reduce(at::ScalarType dtype, const ReduceOp& op) const;
  Wire wire_for_move(at::ScalarType dtype) const;
  // Sets op().reduce. PREMUL_SUM becomes SUM: the caller passes scaled() tensors.
  void set_reduce(const ReduceOp& op);
  // The tensor times the factor of PREMUL_SUM, as a new contiguous tensor of its type; the tensor itself for
  // others.
  at::Tensor scaled(const at::Tensor& tensor, const ReduceOp& op) const;

  // Tells the debug wrapper what is compared between ranks, when there is one.
  void describe(at::TensorList tensors, bool shapes_may_differ = false);

  // The engine does operations of this kind.
  bool offers(lockstep_op_kind kind) const;
  // The engine takes parts that are in rows (lockstep_op.send_rows).
  bool takes_rows() const;

  // An operation on one tensor in place.
  Work start_in_place(at::Tensor tensor, Wire wire);
  // An operation from one buffer to another, both contiguous; an undefined one is none. `held` is kept until
  // it is over.
  Work start(const at::Tensor& send, const at::Tensor& recv, std::int64_t count, Wire wire, HeldTensors held);
  // Several, under one Work. They are complete but for what OperationRequest says.
  Work start_all(std::vector<lockstep_op> ops, HeldTensors held);
  Work start_barrier();

 private:
  template <class Options>
  static bool is_async(const Options& options) {
    return options.async_op;
  }
  std::string prefix() const;
  void check_offered(lockstep_op_kind kind) const;
  void check_factor(at::ScalarType type, const ReduceOp& op) const;
  void warn_not_member() const;
  void refuse_inside_batch() const;
  [[noreturn]] void refuse_timeout() const;
  Work launch(HeldTensors held);
  // Names the stream of the call's device in every op: the current one, which its temporaries were filled in.
  void bind_stream();
  // What fails here is reported to the call logger (call_log.h).
  void run();
  Work post(HeldTensors held);
  void report(const Failure& failure) const;
  // The profiler's event of the operation; null when nobody looks, which costs a few nanoseconds to find out.
  std::shared_ptr<at::RecordFunction> begin_event() const;

  // What serves the device of the tensors; the group itself before one was checked.
  GroupBase& part() const { return part_ != nullptr ? *part_ : *group_; }

  const std::shared_ptr<GroupBase> group_;
  const bool async_;
  GroupBase* part_ = nullptr;
  std::optional<c10::Device> device_;  // of the tensors; unset before one was checked
  OperationRequest request_;
};

// The rank in the group that a caller named by its rank in the world or in the group. -1 and the reason in
// `why` when both are given, when neither is and there is no fallback (a rank in the world), and when it is
// no member.
struct RootArgument {
  std::optional<int> in_world, in_group;
  const char* role;  // "src"
  std::optional<int> fallback{};
};
int find_root(const GroupBase& group, RootArgument argument, std::string& why);

// The engine can use the tensor's memory without a copy.
bool is_plain(const at::Tensor& tensor);
// The two share memory, or a cheap check cannot tell: what is read must be copied before the other is
// written.
bool may_share_memory(const at::Tensor& a, const at::Tensor& b);
// Some of its elements surely share memory: an expanded view.
bool overlaps_itself(const at::Tensor& tensor);
// An uninitialised contiguous tensor of the same sizes and type.
at::Tensor plain_like(const at::Tensor& tensor);
// A plain copy.
at::Tensor plain_copy(const at::Tensor& tensor);
// The tensor itself when plain, else a plain copy.
at::Tensor plain(const at::Tensor& tensor);
// Sizes with complex numbers counted as a last dimension of two.
std::vector<std::int64_t> real_sizes(const at::Tensor& tensor);

}  // namespace lockstep::internal
