#include "lockstep/optim/average_parameters.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"
#include "lockstep/optim/detail/sharded_over.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep {
namespace {

// Two chunks are in memory at a time, whatever the size of the model.
constexpr std::int64_t kChunkBytes = 16 * 1024 * 1024;

void check(const std::vector<at::Tensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    const auto refuse = [i](ErrorKind kind, const auto&... parts) {
      base::raise(kind, base::cat("average_parameters: parameter ", i, " ", parts...));
    };
    if (!parameter.defined()) refuse(ErrorKind::kUsage, "is an undefined tensor");
    if (parameter.layout() != at::kStrided || parameter.device() != parameters.front().device()) {
      refuse(ErrorKind::kUnsupported, "is a ", parameter.layout(), " tensor on ", parameter.device(),
             "; dense tensors on one device can be averaged");
    }
    if (!at::isFloatingType(parameter.scalar_type()) && !at::isComplexType(parameter.scalar_type())) {
      refuse(ErrorKind::kUsage, "is of type ", parameter.scalar_type(),
             ", which has no mean; leave it out, or convert it to a floating type");
    }
  }
}

// The widest of them: no parameter loses precision on the way, and all go through one kind of operation.
at::ScalarType common_type(const std::vector<at::Tensor>& parameters) {
  auto type = parameters.empty() ? at::kFloat : parameters.front().scalar_type();
  for (const at::Tensor& parameter : parameters) type = c10::promoteTypes(type, parameter.scalar_type());
  return type;
}

// The parameters' elements laid end to end and cut into chunks of equal size.
class FlatElements {
 public:
  // Detached tensors share the version counters of the parameters, which therefore move when they are
  // written. Of sharded parameters the local pieces are averaged.
  explicit FlatElements(const std::vector<at::Tensor>& parameters)
      : whole_(parameters), parameters_(internal::local_shards(parameters)) {
    for (const at::Tensor& parameter : parameters_) {
      dense_.push_back(parameter.detach().contiguous().view(-1));
      starts_.push_back(size_);
      size_ += parameter.numel();
    }
  }
  std::int64_t size() const { return size_; }
  c10::Device device() const { return whole_.empty() ? c10::Device(c10::kCPU) : whole_.front().device(); }

  void copy_to(const at::Tensor& chunk, std::int64_t from) const {
    for_each_piece(from, chunk.numel(), [&](const at::Tensor& piece, std::int64_t at) {
      chunk.narrow(0, at, piece.numel()).copy_(piece);
    });
  }
  void copy_from(const at::Tensor& chunk, std::int64_t from) const {
    for_each_piece(from, chunk.numel(), [&](const at::Tensor& piece, std::int64_t at) {
      piece.copy_(chunk.narrow(0, at, piece.numel()));
    });
  }
  // For parameters that are not contiguous: they were processed as copies.
  void write_back() const {
    for (std::size_t i = 0; i < dense_.size(); ++i) {
      if (!parameters_[i].is_contiguous())
        parameters_[i].detach().copy_(dense_[i].view(parameters_[i].sizes()));
      // A piece has a version of its own, which autograd does not look at.
      if (!parameters_[i].is_same(whole_[i])) whole_[i].unsafeGetTensorImpl()->bump_version();
    }
  }

 private:
  // A chunk may begin and end in the middle of a parameter: visits the overlap of [from, from + n) with each.
  template <class Visit>
  void for_each_piece(std::int64_t from, std::int64_t n, const Visit& visit) const {
    auto i =
        static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), from) - starts_.begin());
    for (i = i == 0 ? 0 : i - 1; i < dense_.size() && starts_[i] < from + n; ++i) {
      const std::int64_t begin = std::max(from, starts_[i]);
      const std::int64_t end = std::min(from + n, starts_[i] + dense_[i].numel());
      if (begin < end) visit(dense_[i].narrow(0, begin - starts_[i], end - begin), begin - from);
    }
  }

  const std::vector<at::Tensor>& whole_;
  const std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> dense_;
  std::vector<std::int64_t> starts_;
  std::int64_t size_ = 0;
};

void average(const std::vector<at::Tensor>& parameters, const Group& group, std::source_location where) {
  const FlatElements elements(parameters);
  const auto type = common_type(parameters);
  const auto n_chunk = kChunkBytes / static_cast<std::int64_t>(c10::elementSize(type));
  // Without elements, too, there is one operation, so that a disagreement between ranks is detected.
  const auto n_chunks = std::max<std::int64_t>(1, (elements.size() + n_chunk - 1) / n_chunk);
  const auto length = [&](std::int64_t k) { return std::min(n_chunk, elements.size() - k * n_chunk); };

  // Two buffers in turn: while one is being reduced, the other is filled or emptied. Chunk k reuses the
  // buffer of k - 2, whose average must have been copied out before.
  std::array<at::Tensor, 2> memory;
  std::array<Work, 2> works;
  const auto land = [&](std::int64_t k) {
    works[k % 2].wait();
    elements.copy_from(memory[k % 2].narrow(0, 0, length(k)), k * n_chunk);
  };
  for (std::int64_t k = 0; k < n_chunks; ++k) {
    if (k >= 2) land(k - 2);
    auto& room = memory[k % 2];
    // The first chunk is never shorter than a later one of its buffer, so the buffer is allocated once.
    if (!room.defined())
      room = empty_shared({length(k)}, type, {.group = group, .device = elements.device(), .where = where});
    const at::Tensor chunk = room.narrow(0, 0, length(k));
    elements.copy_to(chunk, k * n_chunk);
    works[k % 2] =
        all_reduce(chunk, {.op = ReduceOp::kAvg, .group = group, .async_op = true, .where = where});
  }
  for (std::int64_t k = std::max<std::int64_t>(0, n_chunks - 2); k < n_chunks; ++k) land(k);
  // When an operation fails, this is not reached: contiguous parameters of earlier chunks hold averages
  // already, all others their own values.
  elements.write_back();
}

void keep_trained(const std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& kept) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.defined()) {
      base::raise(ErrorKind::kUsage, "get_params_to_average: a parameter is an undefined tensor");
    }
    if (parameter.grad().defined()) kept.push_back(parameter);
  }
}

}  // namespace

void average_parameters(const std::vector<at::Tensor>& parameters, AverageParametersOptions options) {
  const Group group = options.group ? options.group : default_group();
  if (!is_group_member(group)) return;
  check(parameters);
  // After the checks, so that a program fails in the same way on one rank.
  if (get_world_size(group) == 1) return;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    internal::refuse_own_mesh("average_parameters", std::to_string(i), parameters[i], group);
  average(parameters, group, options.where);
}

std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> kept;
  keep_trained(parameters, kept);
  return kept;
}

std::vector<at::Tensor> get_params_to_average(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<at::Tensor> kept;
  for (const auto& group : groups) keep_trained(group.params(), kept);
  return kept;
}

void average_parameters_or_parameter_groups(const std::vector<at::Tensor>& parameters,
                                            AverageParametersOptions options) {
  average_parameters(get_params_to_average(parameters), std::move(options));
}

void average_parameters_or_parameter_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                            AverageParametersOptions options) {
  average_parameters(get_params_to_average(groups), std::move(options));
}

}  // namespace lockstep
