#include "lockstep/collective/functional.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>
#include <numeric>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/coalescing.h"
#include "lockstep/collective/differentiable.h"
#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"

namespace lockstep::functional {

struct AsyncTensor::State {
  Work work;
  std::mutex mutex;
  at::Tensor tensor;                                    // guarded by mutex until ready
  std::function<at::Tensor(const at::Tensor&)> finish;  // guarded by mutex; empty when done
};

AsyncTensor::AsyncTensor(at::Tensor tensor, Work work, std::function<at::Tensor(const at::Tensor&)> finish)
    : state_(new State{
          .work = std::move(work), .mutex = {}, .tensor = std::move(tensor), .finish = std::move(finish)}) {}

// The reference stays valid as long as any copy of this AsyncTensor: once finish has run, nobody assigns to
// `tensor` again.
const at::Tensor& AsyncTensor::wait() const {
  static const at::Tensor undefined;
  if (!state_) return undefined;
  // Without the mutex: it may block for long, and several threads may wait. When the operation fails it
  // throws, and finish never runs.
  state_->work.wait();
  const std::lock_guard lock(state_->mutex);
  if (state_->finish) {
    // Under the mutex, so that one of the waiting threads does the work and the others see its result.
    const at::NoGradGuard no_grad;
    state_->tensor = state_->finish(state_->tensor);
    state_->finish = nullptr;
  }
  return state_->tensor;
}

// Without waiting, for coalesced(), which gives the memory to an AsyncTensor with another Work.
at::Tensor AsyncTensor::unfinished() const {
  if (!state_) return {};
  const std::lock_guard lock(state_->mutex);
  return state_->tensor;
}

bool AsyncTensor::done() const {
  return !state_ || state_->work.done();
}

const at::Tensor& AsyncTensor::result() const {
  if (!done())
    base::raise(ErrorKind::kUsage, "result() of a tensor that is not ready; wait() blocks until it is");
  return wait();
}

std::exception_ptr AsyncTensor::error() const {
  return state_ ? state_->work.error() : nullptr;
}

void AsyncTensor::on_done(std::function<void(const AsyncTensor&)> fn) const {
  (state_ ? state_->work : Work()).on_done([self = *this, fn = std::move(fn)](const Work&) { fn(self); });
}

namespace {

template <class... Parts>
[[noreturn]] void refuse(const char* name, const Options& options, const Parts&... parts) {
  base::raise(ErrorKind::kUsage, base::cat("functional::", name, " (called at ", options.where.file_name(),
                                           ":", options.where.line(), "): ", parts...));
}

// False, with a warning, for a process that is not in the group. The constructor of a CollectiveCall resolves
// the group and validates the timeout; it is only made for its warning when this process is not a member.
bool takes_part(OpType type, const Options& options) {
  return is_group_member(options.group) || internal::CollectiveCall(type, options, true).takes_part(true);
}

// What all options have in common.
template <class Some>
Options tail_of(const Some& options) {
  return {.group = options.group, .timeout = options.timeout, .where = options.where};
}

// The options of the tensor collective below.
template <class Below>
Below started(Below below, const Options& options) {
  below.group = options.group;
  below.async_op = true;
  below.timeout = options.timeout;
  below.where = options.where;
  return below;
}

// Functional: self is never written, so an operation in place needs a copy. The AsyncTensor holds it, and the
// Work's state holds it while the engine uses it.
at::Tensor plain_copy(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().clone(at::MemoryFormat::Contiguous);
}

at::Tensor room(const at::Tensor& like, std::vector<std::int64_t> sizes) {
  return at::empty(sizes, like.options().requires_grad(false).memory_format(at::MemoryFormat::Contiguous));
}

std::int64_t dim_of(const char* name, const Options& options, const at::Tensor& tensor, std::int64_t dim) {
  if (!tensor.defined()) refuse(name, options, "self is an undefined tensor");
  // A tensor without dimensions counts as one of size 1, as in torch: dimension 0 and -1 exist.
  const auto n = std::max<std::int64_t>(tensor.dim(), 1);
  if (dim < -n || dim >= n)
    refuse(name, options, "there is no dimension ", dim, " in a tensor of ", tensor.dim());
  return dim < 0 ? dim + n : dim;
}

// Parts along `dim` one after the other along dimension 0, and back. The collectives used here take parts
// that follow each other in memory. Along dimension 0 they do; along any other the input is repacked before,
// or the output after the operation.
at::Tensor to_rows(const at::Tensor& tensor, std::int64_t n, std::int64_t dim) {
  return dim == 0 ? tensor : at::cat(tensor.chunk(n, dim), 0);
}
at::Tensor from_rows(const at::Tensor& tensor, std::int64_t n, std::int64_t dim) {
  return dim == 0 ? tensor : at::cat(tensor.chunk(n, 0), dim);
}

void check_divides(const char* name, const Options& options, const at::Tensor& self, std::int64_t dim,
                   int n) {
  if (self.dim() == 0 || self.size(dim) % n != 0) {
    refuse(name, options, "dimension ", dim, " of a tensor of sizes ", self.sizes(), " does not divide by ",
           n, " ranks");
  }
}

std::int64_t total(const std::vector<std::int64_t>& parts) {
  // Negative parts are refused by the operation itself.
  return std::max<std::int64_t>(0, std::accumulate(parts.begin(), parts.end(), std::int64_t{0}));
}

// Collects n calls and starts them as one; every result waits for all.
template <class Call>
std::vector<AsyncTensor> coalesced(std::size_t n, const Options& options, const Call& call) {
  if (n == 0) return {};
  if (!takes_part(OpType::kCoalesced, options)) return std::vector<AsyncTensor>(n);
  std::vector<at::Tensor> collected;
  // Inside the scope a collective only registers its tensors; its own Work cannot be waited for and is
  // dropped with the AsyncTensor. If a call raises, the scope is left without launching: nothing was sent on
  // this rank.
  CoalescingScope scope(started(CoalescingOptions{}, options));
  for (std::size_t i = 0; i < n; ++i) collected.push_back(call(i).unfinished());
  const Work work = scope.launch();
  std::vector<AsyncTensor> results;
  for (auto& tensor : collected) results.emplace_back(std::move(tensor), work);
  return results;
}

}  // namespace

AsyncTensor broadcast(const at::Tensor& self, int src, Options options) {
  if (!takes_part(OpType::kBroadcast, options)) return {};
  dim_of("broadcast", options, self, 0);
  auto out = plain_copy(self);
  auto work = lockstep::broadcast(out, started(BroadcastOptions{.src = src}, options));
  return {std::move(out), std::move(work)};
}

AsyncTensor all_reduce(const at::Tensor& self, ReduceOptions options) {
  const Options tail = tail_of(options);
  if (!takes_part(OpType::kAllReduce, tail)) return {};
  dim_of("all_reduce", tail, self, 0);
  auto out = plain_copy(self);
  auto work = lockstep::all_reduce(out, started(AllReduceOptions{.op = options.op}, tail));
  return {std::move(out), std::move(work)};
}

AsyncTensor all_gather_tensor(const at::Tensor& self, std::int64_t gather_dim, Options options) {
  if (!takes_part(OpType::kAllGatherIntoTensor, options)) return {};
  const auto dim = dim_of("all_gather_tensor", options, self, gather_dim);
  const int n = get_world_size(options.group);
  // Received along dimension 0 whatever dimension was asked for; the first wait() moves the parts.
  auto sizes = self.dim() == 0 ? std::vector<std::int64_t>{1} : self.sizes().vec();
  sizes.front() *= n;
  auto out = room(self, sizes);
  auto work = lockstep::all_gather_into_tensor(out, self.detach(), started(AllGatherOptions{}, options));
  if (dim == 0) return {std::move(out), std::move(work)};
  return {std::move(out), std::move(work),
          [n, dim](const at::Tensor& rows) { return from_rows(rows, n, dim); }};
}

AsyncTensor reduce_scatter_tensor(const at::Tensor& self, std::int64_t scatter_dim, ReduceOptions options) {
  const Options tail = tail_of(options);
  if (!takes_part(OpType::kReduceScatterTensor, tail)) return {};
  const auto dim = dim_of("reduce_scatter_tensor", tail, self, scatter_dim);
  const int n = get_world_size(options.group);
  check_divides("reduce_scatter_tensor", tail, self, dim, n);
  // With dimension 0 this is the memory of self, which the caller must not write before the operation is
  // over. The Work's state keeps it alive.
  const auto rows = to_rows(self.detach(), n, dim);
  auto sizes = rows.sizes().vec();
  sizes.front() /= n;
  auto out = room(self, sizes);
  auto work =
      lockstep::reduce_scatter_tensor(out, rows, started(ReduceScatterOptions{.op = options.op}, tail));
  return {std::move(out), std::move(work)};
}

AsyncTensor all_to_all_single(const at::Tensor& self, AllToAllSingleOptions options) {
  const Options tail = tail_of(options);
  if (!takes_part(OpType::kAllToAllSingle, tail)) return {};
  dim_of("all_to_all_single", tail, self, 0);
  if (self.dim() == 0) refuse("all_to_all_single", tail, "self has no dimension to split");
  auto sizes = self.sizes().vec();
  if (!options.output_split_sizes.empty()) sizes.front() = total(options.output_split_sizes);
  auto out = room(self, sizes);
  auto work = lockstep::all_to_all_single(
      out, self.detach(),
      started(lockstep::AllToAllSingleOptions{.output_split_sizes = options.output_split_sizes,
                                              .input_split_sizes = options.input_split_sizes},
              tail));
  return {std::move(out), std::move(work)};
}

std::vector<AsyncTensor> all_reduce_coalesced(const std::vector<at::Tensor>& self, ReduceOptions options) {
  return coalesced(self.size(), tail_of(options),
                   [&](std::size_t i) { return all_reduce(self[i], options); });
}

std::vector<AsyncTensor> all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& self,
                                                          Options options) {
  return coalesced(self.size(), options,
                   [&](std::size_t i) { return all_gather_tensor(self[i], 0, options); });
}

std::vector<AsyncTensor> reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& self,
                                                         const std::vector<std::int64_t>& scatter_dim,
                                                         ReduceOptions options) {
  if (self.size() != scatter_dim.size()) {
    refuse("reduce_scatter_tensor_coalesced", tail_of(options), self.size(), " tensors and ",
           scatter_dim.size(), " scatter dimensions; give one for each");
  }
  return coalesced(self.size(), tail_of(options),
                   [&](std::size_t i) { return reduce_scatter_tensor(self[i], scatter_dim[i], options); });
}

at::Tensor all_gather_tensor_autograd(const at::Tensor& self, std::int64_t gather_dim, Options options) {
  const auto dim = dim_of("all_gather_tensor_autograd", options, self, gather_dim);
  // Synchronous, unlike the functions above: what autograd records is a tensor, which cannot be waited for
  // later.
  const auto parts = differentiable::all_gather(
      self.dim() == 0 ? self.reshape({1}) : self,
      {.group = options.group, .timeout = options.timeout, .where = options.where});
  return at::cat(parts, dim);
}

at::Tensor reduce_scatter_tensor_autograd(const at::Tensor& self, std::int64_t scatter_dim,
                                          ReduceOptions options) {
  const Options tail = tail_of(options);
  const auto dim = dim_of("reduce_scatter_tensor_autograd", tail, self, scatter_dim);
  if (!is_group_member(options.group))
    refuse("reduce_scatter_tensor_autograd", tail, "this process is not a member of the group");
  const int n = get_world_size(options.group);
  check_divides("reduce_scatter_tensor_autograd", tail, self, dim, n);
  return differentiable::reduce_scatter(
      self.chunk(n, dim),
      {.op = options.op, .group = options.group, .timeout = options.timeout, .where = options.where});
}

at::Tensor all_to_all_single_autograd(const at::Tensor& self, AllToAllSingleOptions options) {
  return differentiable::all_to_all_single(self, {.output_split_sizes = options.output_split_sizes,
                                                  .input_split_sizes = options.input_split_sizes,
                                                  .group = options.group,
                                                  .timeout = options.timeout,
                                                  .where = options.where});
}

}  // namespace lockstep::functional
