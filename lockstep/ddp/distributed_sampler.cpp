#include "lockstep/ddp/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/group/world.h"

namespace lockstep {
namespace {

std::vector<std::size_t> permutation(std::size_t n, std::uint64_t seed) {
  const at::Tensor drawn = at::randperm(static_cast<std::int64_t>(n), at::detail::createCPUGenerator(seed),
                                        at::TensorOptions(at::kLong));
  const auto* begin = drawn.const_data_ptr<std::int64_t>();
  return {begin, begin + n};
}

std::int64_t read_number(torch::serialize::InputArchive& archive, const std::string& key) {
  at::Tensor value;
  archive.read(key, value);
  return value.item<std::int64_t>();
}

}  // namespace

DistributedSampler::DistributedSampler(std::size_t dataset_size, DistributedSamplerOptions options)
    : shuffle_(options.shuffle), seed_(options.seed), drop_last_(options.drop_last) {
  const int n_replicas = options.num_replicas ? *options.num_replicas : get_world_size();
  const int rank = options.rank ? *options.rank : get_rank();
  if (n_replicas < 1) {
    base::raise(ErrorKind::kUsage,
                base::cat("DistributedSampler: num_replicas must be at least 1, not ", n_replicas));
  }
  if (rank < 0 || rank >= n_replicas) {
    base::raise(ErrorKind::kUsage, base::cat("DistributedSampler: rank ", rank, " must be in [0, ",
                                             n_replicas - 1, "] with ", n_replicas, " replicas"));
  }
  n_replicas_ = static_cast<std::size_t>(n_replicas);
  rank_ = static_cast<std::size_t>(rank);
  set_dataset_size(dataset_size);
  reset();
}

void DistributedSampler::set_dataset_size(std::size_t dataset_size) {
  dataset_size_ = dataset_size;
  n_samples_ = drop_last_ ? dataset_size / n_replicas_ : (dataset_size + n_replicas_ - 1) / n_replicas_;
}

std::vector<std::size_t> DistributedSampler::indices() const {
  std::vector<std::size_t> order;
  if (shuffle_) {
    order = permutation(dataset_size_, seed_ + epoch());
  } else {
    order.resize(dataset_size_);
    std::iota(order.begin(), order.end(), std::size_t{0});
  }
  std::vector<std::size_t> mine;
  mine.reserve(n_samples_);
  // Beyond the end it begins again: that is the padding.
  for (std::size_t i = 0; i < n_samples_; ++i)
    mine.push_back(order[(rank_ + i * n_replicas_) % dataset_size_]);
  return mine;
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size) set_dataset_size(*new_size);
  drawn_ = indices();
  position_ = 0;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  const std::size_t n = std::min(batch_size, drawn_.size() - position_);
  if (n == 0) return std::nullopt;
  const auto begin = drawn_.begin() + static_cast<std::ptrdiff_t>(position_);
  position_ += n;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(n));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", at::scalar_tensor(static_cast<std::int64_t>(epoch()), at::kLong),
                /*is_buffer=*/true);
  archive.write("position", at::scalar_tensor(static_cast<std::int64_t>(position_), at::kLong),
                /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const std::int64_t epoch = read_number(archive, "epoch");
  const std::int64_t position = read_number(archive, "position");
  set_epoch(static_cast<std::size_t>(epoch));
  reset();
  if (position < 0 || static_cast<std::size_t>(position) > drawn_.size()) {
    base::raise(ErrorKind::kUsage,
                base::cat("DistributedSampler: the saved position ", position, " is outside the dataset"));
  }
  position_ = static_cast<std::size_t>(position);
}

}  // namespace lockstep
