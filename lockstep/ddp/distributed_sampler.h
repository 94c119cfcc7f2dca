// Splits a dataset over the ranks: in each epoch every rank draws the same permutation and takes every N-th
// index of it.
//
//   lockstep::DistributedSampler sampler(dataset.size().value());
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, 64);
//   for (std::size_t epoch = 0; epoch < 10; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& batch : *loader) ...
//   }
//
// The permutation is at::randperm with its own CPU generator seeded with seed + epoch: identical to that of
// Python's torch.utils.data.DistributedSampler, and independent of the process's default generator, which
// rank threads share. Thread safety: one thread at a time per copy. Copies share the epoch, because a data
// loader keeps its own copy.
#pragma once

#include <torch/data/samplers/base.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

struct DistributedSamplerOptions {
  std::optional<int> num_replicas{};  // unset: size of the default group
  std::optional<int> rank{};          // unset: rank in the default group
  bool shuffle = true;
  std::uint64_t seed = 0;  // the same on all ranks
  // When the dataset does not divide evenly. False: it is padded from its beginning; true: its tail is
  // dropped.
  bool drop_last = false;
};

class DistributedSampler final : public torch::data::samplers::Sampler<> {
 public:
  // Raises kUsage for a rank outside [0, num_replicas), and when a value is unset and there is no default
  // group.
  explicit DistributedSampler(std::size_t dataset_size, DistributedSamplerOptions options = {});

  // Selects the permutation of the next reset(). Without it every epoch has the same order.
  void set_epoch(std::size_t epoch) { epoch_->store(epoch); }
  std::size_t epoch() const { return epoch_->load(); }
  // Number of indices this rank gets per epoch; the same on all ranks.
  std::size_t size() const { return n_samples_; }
  // This rank's indices for the current epoch.
  std::vector<std::size_t> indices() const;

  // Called by the data loader. reset starts an epoch, with a new dataset size if given.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  // Epoch and position.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void set_dataset_size(std::size_t dataset_size);

  std::size_t n_replicas_ = 1;
  std::size_t rank_ = 0;
  bool shuffle_;
  std::uint64_t seed_;
  bool drop_last_;
  std::size_t dataset_size_ = 0;
  std::size_t n_samples_ = 0;
  std::shared_ptr<std::atomic<std::size_t>> epoch_ = std::make_shared<std::atomic<std::size_t>>(0);
  std::vector<std::size_t> drawn_;
  std::size_t position_ = 0;
};

}  // namespace lockstep
