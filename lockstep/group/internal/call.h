// One call of a collective on its way to the group: checks its tensors, finds what the engine calls their type, and
// starts it. Every message names the operation, the group, the rank and the caller's line. Private to group/.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/group/collectives.h"
#include "lockstep/group/internal/group_base.h"

namespace lockstep::internal {

// How the engine sees one element: `units` elements of `dtype`. Complex numbers are two reals; types the engine
// does not know are bytes.
struct Wire {
  lockstep_dtype dtype;
  std::int64_t units;
};

class Call {
 public:
  template <class Options>
  Call(const char* name, const Options& options)
      : group_(resolve(options.group)),
        async_(options.async_op),
        request_{.name = name, .where = options.where, .timeout = options.timeout} {
    request_.op.struct_size = sizeof(lockstep_op);
  }

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  lockstep_op& op() { return request_.op; }

  template <class... Parts>
  [[noreturn]] void refuse(ErrorKind kind, const Parts&... parts) const {
    raise(kind, cat(prefix(), parts...), ErrorFamily::kGeneral);
  }

  // Defined, dense, on the CPU. `role` is the argument's name.
  void check(const at::Tensor& tensor, const char* role) const;
  // As check, for a tensor that is written: no two elements may share memory.
  void check_output(const at::Tensor& tensor, const char* role) const;
  // Same type as `other`; a complex type may stand for its real one.
  void check_same_type(const at::Tensor& tensor, const char* role, const at::Tensor& other) const;
  // The two share no memory. True when that cannot be told cheaply: go through a temporary.
  bool check_apart(const at::Tensor& a, const char* role_a, const at::Tensor& b, const char* role_b) const;
  void check_root(int root, const char* role) const;

  // Raises kUsage when the operation makes no sense for the type, kUnsupported when the engine cannot do it.
  Wire wire_for_reduce(at::ScalarType dtype, ReduceOp op) const;
  Wire wire_for_move(at::ScalarType dtype) const;

  // An operation on one tensor in place.
  Work start_in_place(at::Tensor tensor, Wire wire);
  // An operation from one buffer to another, both contiguous; `held` is kept until it is over.
  Work start(const at::Tensor& send, const at::Tensor& recv, std::int64_t count, Wire wire, Held held);
  Work start_barrier();

 private:
  std::string prefix() const;
  void check_offered() const;
  Work launch(Held held);

  const std::shared_ptr<GroupBase> group_;
  const bool async_;
  Request request_;
};

const char* name_of(ReduceOp op);
// The engine can use the tensor's memory as it lies.
bool is_plain(const at::Tensor& tensor);
// An uninitialised contiguous tensor of the same sizes and type.
at::Tensor plain_like(const at::Tensor& tensor);
// The tensor itself when plain, else a plain copy.
at::Tensor plain(const at::Tensor& tensor);
// Sizes with complex numbers counted as a last dimension of two.
std::vector<std::int64_t> real_sizes(const at::Tensor& tensor);

}  // namespace lockstep::internal
