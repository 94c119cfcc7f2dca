// Mixed precision: the module computes in a short type, parameters and gradients that optimizers see stay in their own.
//
//   lockstep::DistributedDataParallel model(net, {.mixed_precision = lockstep::MixedPrecision{.param_dtype = at::kBFloat16}});
//
// Each forward pass casts the parameters, and the tensors of its arguments, to param_dtype. Local gradients come out in
// that type, are averaged in reduce_dtype, and land in .grad in the parameter's own type. From a forward pass with
// gradients to the end of its backward pass, or until its outputs are gone, the module's parameters are the short ones;
// otherwise parameters(), torch::save and optimizers find the full ones. Only floating-point tensors are cast.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

struct MixedPrecision {
  // Unset: computed in the parameters' own type.
  std::optional<at::ScalarType> param_dtype{};
  // Unset: param_dtype. gradient_as_bucket_view needs it to be the parameters' own type.
  std::optional<at::ScalarType> reduce_dtype{};
  // Floating-point buffers are cast to it once, at construction, and stay so. Unset: left as they are.
  std::optional<at::ScalarType> buffer_dtype{};
  // Arguments of forward() are cast to param_dtype: tensors, and those inside containers, tuples and structs
  // (visit_tensors.h); what lies behind pointers is the caller's, and left alone. forward() then gets copies of its
  // arguments: what it writes into them the caller does not see, and it must not return a reference to one.
  bool cast_forward_inputs = true;

  std::optional<at::ScalarType> reduced_in() const { return reduce_dtype ? reduce_dtype : param_dtype; }
};

namespace internal {

// Raises kUsage for a type that is not a floating-point one, and when gradients cannot be `views` of buckets because these
// have another type.
void check_mixed_precision(const MixedPrecision& mixed, const std::vector<at::Tensor>& parameters,
                           bool views);

// Parameters that exist twice, full and short, and change places. The short copies keep their memory.
// libtorch saves a parameter itself for the backward pass, not its values: it must be short there, too. So it stays short
// from the forward pass on. Who walks the graph twice finds it shortened again by the node at the outputs (`begins`).
// Thread safety: as the module.
class LowPrecisionParameters : public std::enable_shared_from_this<LowPrecisionParameters> {
 public:
  // Of `parameters` those that are floating-point and not in `dtype` already.
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters, at::ScalarType dtype);

  ~LowPrecisionParameters() { restore(); }
  LowPrecisionParameters(const LowPrecisionParameters&) = delete;
  LowPrecisionParameters& operator=(const LowPrecisionParameters&) = delete;

  bool is_short() const { return short_now_; }
  // Casts and changes places. True when they were full: then libtorch gives out new gradient accumulators.
  bool shorten();
  void restore() noexcept;

  // One forward pass that built a graph. Held by the graph's node at the outputs; when the last such graph is gone, the
  // parameters are full again.
  class Graph {
   public:
    explicit Graph(std::weak_ptr<LowPrecisionParameters> of);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    // A walk of the graph begins. On the thread that walks. True when the parameters were full: as shorten().
    bool begins();

   private:
    void settle();
    const std::weak_ptr<LowPrecisionParameters> of_;
    bool open_ = true;
  };
  // A graph that nobody can watch, since no output of the forward pass is known.
  void expect_unwatched() { unwatched_ = true; }
  // A parameter has got a gradient: the pass is one whose end restores. On the thread that runs backward().
  void on_gradient();

 private:
  void restore_at_end();

  std::vector<at::Tensor> parameters_;
  const at::ScalarType dtype_;
  std::vector<at::Tensor> full_, short_;
  bool short_now_ = false;
  bool ends_ = false;  // the backward pass under way will restore
  int n_open_ = 0;     // graphs that have not been walked
  bool unwatched_ = false;
};

}  // namespace internal
}  // namespace lockstep
