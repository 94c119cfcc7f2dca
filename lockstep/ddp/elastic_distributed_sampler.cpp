#include "lockstep/ddp/elastic_distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <cstdint>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/group/world.h"

namespace lockstep {
namespace {

constexpr const char* kName = "ElasticDistributedSampler";

void write_number(torch::serialize::OutputArchive& archive, const std::string& key, std::size_t value) {
  archive.write(key, at::scalar_tensor(static_cast<std::int64_t>(value), at::kLong), /*is_buffer=*/true);
}

std::size_t read_number(torch::serialize::InputArchive& archive, const std::string& key, std::size_t most) {
  at::Tensor value;
  archive.read(key, value);
  const auto number = value.item<std::int64_t>();
  if (number < 0 || static_cast<std::uint64_t>(number) > most)
    base::raise(ErrorKind::kUsage,
                base::cat(kName, ": the saved ", key, " is ", number, ", at most ", most, " is possible"));
  return static_cast<std::size_t>(number);
}

}  // namespace

ElasticDistributedSampler::ElasticDistributedSampler(std::size_t dataset_size,
                                                     ElasticDistributedSamplerOptions options)
    : dataset_size_(dataset_size) {
  const int n_replicas = options.num_replicas ? *options.num_replicas : get_world_size();
  const int rank = options.rank ? *options.rank : get_rank();
  if (n_replicas < 1)
    base::raise(ErrorKind::kUsage,
                base::cat(kName, ": num_replicas is ", n_replicas, "; at least 1 is needed"));
  if (rank < 0 || rank >= n_replicas) {
    base::raise(ErrorKind::kUsage, base::cat(kName, ": rank is ", rank, "; with ", n_replicas,
                                             " replicas ranks are 0 to ", n_replicas - 1));
  }
  n_replicas_ = static_cast<std::size_t>(n_replicas);
  rank_ = static_cast<std::size_t>(rank);
  set_start_index(options.start_index);
  reset();
}

void ElasticDistributedSampler::set_start_index(std::size_t start_index) {
  if (start_index >= dataset_size_) {
    base::raise(ErrorKind::kUsage, base::cat(kName, ": start_index is ", start_index, ", the dataset has ",
                                             dataset_size_, " samples; nothing would be left"));
  }
  shared_->start_index = start_index;
}

std::size_t ElasticDistributedSampler::size() const {
  return (dataset_size_ - start_index() + n_replicas_ - 1) / n_replicas_;
}

std::vector<std::size_t> ElasticDistributedSampler::indices() const {
  const std::size_t first = start_index(), n_left = dataset_size_ - first;
  const at::Tensor order =
      at::randperm(static_cast<std::int64_t>(n_left), at::detail::createCPUGenerator(epoch()),
                   at::TensorOptions(at::kLong));
  const auto* drawn = order.const_data_ptr<std::int64_t>();
  std::vector<std::size_t> mine;
  // Beyond the end it begins again: that is the padding.
  for (std::size_t i = 0; i < size(); ++i)
    mine.push_back(first + static_cast<std::size_t>(drawn[(rank_ + i * n_replicas_) % n_left]));
  return mine;
}

void ElasticDistributedSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size) {
    dataset_size_ = *new_size;
    set_start_index(start_index());
  }
  drawn_ = indices();
  position_ = 0;
}

std::optional<std::vector<std::size_t>> ElasticDistributedSampler::next(std::size_t batch_size) {
  const std::size_t n = std::min(batch_size, drawn_.size() - position_);
  if (n == 0) return std::nullopt;
  const auto begin = drawn_.begin() + static_cast<std::ptrdiff_t>(position_);
  position_ += n;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(n));
}

void ElasticDistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  write_number(archive, "epoch", epoch());
  write_number(archive, "start_index", start_index());
  write_number(archive, "position", position_);
}

void ElasticDistributedSampler::load(torch::serialize::InputArchive& archive) {
  set_epoch(read_number(archive, "epoch", SIZE_MAX >> 1));
  set_start_index(read_number(archive, "start_index", dataset_size_));
  reset();
  position_ = read_number(archive, "position", drawn_.size());
}

}  // namespace lockstep
