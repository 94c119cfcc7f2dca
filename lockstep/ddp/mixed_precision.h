// Mixed precision: the module computes in a lower-precision type; the parameters and gradients that
// optimizers see keep their own.
//
//   lockstep::MixedPrecision bf16{.param_dtype = at::kBFloat16};
//   lockstep::DistributedDataParallel model(net, {.mixed_precision = bf16});
//
// Each forward pass casts the parameters, and the tensors of its arguments, to param_dtype. Local gradients
// are computed in that type, averaged in reduce_dtype, and stored in .grad in the parameter's own type. From
// a forward pass with gradients to the end of its backward pass, or until its outputs are destroyed, the
// module's parameters are the low-precision ones; otherwise parameters(), torch::save and optimizers see the
// full ones. Only floating-point tensors are cast.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

struct MixedPrecision {
  // Unset: computed in the parameters' own type.
  std::optional<at::ScalarType> param_dtype{};
  // Unset: param_dtype. With gradient_as_bucket_view it must be the parameters' own type.
  std::optional<at::ScalarType> reduce_dtype{};
  // Floating-point buffers are cast to it once, at construction. Unset: not cast.
  std::optional<at::ScalarType> buffer_dtype{};
  // Arguments of forward() are cast to param_dtype: tensors, and those inside containers, tuples and structs
  // (visit_tensors.h); tensors behind pointers are not cast. forward() then gets copies of its arguments: the
  // caller does not see what it writes to them, and it must not return a reference to one.
  bool cast_forward_inputs = true;

  std::optional<at::ScalarType> reduced_in() const { return reduce_dtype ? reduce_dtype : param_dtype; }
};

namespace internal {

// Raises kUsage for a type that is not floating-point, and when gradients cannot be `views` of buckets
// because the buckets have another type.
void check_mixed_precision(const MixedPrecision& mixed, const std::vector<at::Tensor>& parameters,
                           bool views);

// Parameters that exist in full and low precision and are swapped. The low-precision copies keep their
// memory. libtorch saves the parameter itself for the backward pass, not its values: it must be low precision
// there, too. So it stays low precision from the forward pass on. When a graph is traversed twice, the node
// at the outputs casts it again (`begins`). Thread safety: as the module.
class LowPrecisionParameters : public std::enable_shared_from_this<LowPrecisionParameters> {
 public:
  // Manages those of `parameters` that are floating-point and not already of type `dtype`.
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters, at::ScalarType dtype);

  ~LowPrecisionParameters() { restore(); }
  LowPrecisionParameters(const LowPrecisionParameters&) = delete;
  LowPrecisionParameters& operator=(const LowPrecisionParameters&) = delete;

  bool is_short() const { return short_now_; }
  // Casts and swaps in the low-precision copies. True when they were full: then libtorch creates new gradient
  // accumulators.
  bool shorten();
  void restore() noexcept;

  // One forward pass that built a graph. Held by the graph's node at the outputs; when the last such graph is
  // destroyed, the parameters are full again.
  class Graph {
   public:
    explicit Graph(std::weak_ptr<LowPrecisionParameters> of);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    // A traversal of the graph begins; called on the traversing thread. Returns as shorten().
    bool begins();

   private:
    void settle();
    const std::weak_ptr<LowPrecisionParameters> of_;
    bool open_ = true;
  };
  // A graph that cannot be observed, since no output of the forward pass is known.
  void expect_unwatched() { unwatched_ = true; }
  // A parameter got a gradient: the end of this pass restores the parameters. On the thread that runs
  // backward().
  void on_gradient();

 private:
  void restore_at_end();

  std::vector<at::Tensor> parameters_;
  const at::ScalarType dtype_;
  std::vector<at::Tensor> full_, short_;
  bool short_now_ = false;
  bool ends_ = false;  // the running backward pass will restore
  int n_open_ = 0;     // graphs not yet traversed
  bool unwatched_ = false;
};

}  // namespace internal
}  // namespace lockstep
