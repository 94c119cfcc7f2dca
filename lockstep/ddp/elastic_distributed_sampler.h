// A DistributedSampler that begins somewhere inside the epoch: after a restart, perhaps with another number of ranks, the
// job goes on behind the samples it has seen instead of beginning the epoch again.
//
//   ElasticDistributedSampler sampler(dataset.size().value(), {.start_index = saved});
//   sampler.set_epoch(epoch);  // after the epoch is over: set_start_index(0) for the next one
//
// As torch.distributed.elastic's class of that name: indices below start_index are left out, the rest is permuted under a
// CPU generator seeded with the epoch, padded to a multiple of the ranks by beginning again, and dealt out rank by rank.
// Count in samples of the whole job: start_index is (steps done) * (batch size) * (number of ranks) of the run before.
// Thread safety: one thread at a time per copy. Copies share epoch and start index, because a data loader keeps a copy.
#pragma once

#include <torch/data/samplers/base.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

struct ElasticDistributedSamplerOptions {
  std::optional<int> num_replicas{};  // unset: size of the default group
  std::optional<int> rank{};          // unset: rank in the default group
  std::size_t start_index = 0;        // the same on all ranks
};

class ElasticDistributedSampler final : public torch::data::samplers::Sampler<> {
 public:
  // Raises kUsage for a start_index beyond the dataset, a rank outside [0, num_replicas), and when a value is unset and
  // there is no default group.
  explicit ElasticDistributedSampler(std::size_t dataset_size, ElasticDistributedSamplerOptions options = {});

  // For the next reset().
  void set_epoch(std::size_t epoch) { shared_->epoch = epoch; }
  std::size_t epoch() const { return shared_->epoch; }
  // Raises kUsage for an index beyond the dataset.
  void set_start_index(std::size_t start_index);
  std::size_t start_index() const { return shared_->start_index; }

  // Number of indices this rank gets; the same on all ranks.
  std::size_t size() const;
  // This rank's indices for the present epoch and start index.
  std::vector<std::size_t> indices() const;

  // The data loader's side. reset begins an epoch, with another dataset size when given.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  // Epoch, start index and this rank's position behind it.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Shared {
    std::atomic<std::size_t> epoch{0}, start_index{0};
  };

  std::size_t n_replicas_ = 1;
  std::size_t rank_ = 0;
  std::size_t dataset_size_ = 0;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::vector<std::size_t> drawn_;
  std::size_t position_ = 0;
};

}  // namespace lockstep
