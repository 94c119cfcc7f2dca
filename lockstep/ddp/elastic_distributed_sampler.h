// A DistributedSampler that can start inside an epoch: after a restart, possibly with another number of
// ranks, the job continues after the samples it has seen instead of restarting the epoch.
//
//   ElasticDistributedSampler sampler(dataset.size().value(), {.start_index = saved});
//   sampler.set_epoch(epoch);  // after the epoch is over: set_start_index(0) for the next one
//
// As torch.distributed.elastic's class of that name: indices below start_index are skipped, the rest is
// permuted with a CPU generator seeded with the epoch, padded from the beginning to a multiple of the number
// of ranks, and distributed round-robin. start_index counts samples of the whole job: (steps done) * (batch
// size) * (number of ranks) of the previous run. Thread safety: one thread at a time per copy. Copies share
// epoch and start index, because a data loader keeps a copy.
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
  // Raises kUsage for a start_index beyond the dataset, a rank outside [0, num_replicas), and when a value is
  // unset and there is no default group.
  explicit ElasticDistributedSampler(std::size_t dataset_size, ElasticDistributedSamplerOptions options = {});

  // For the next reset().
  void set_epoch(std::size_t epoch) { shared_->epoch = epoch; }
  std::size_t epoch() const { return shared_->epoch; }
  // Raises kUsage for an index beyond the dataset.
  void set_start_index(std::size_t start_index);
  std::size_t start_index() const { return shared_->start_index; }

  // Number of indices this rank gets; the same on all ranks.
  std::size_t size() const;
  // This rank's indices for the current epoch and start index.
  std::vector<std::size_t> indices() const;

  // Called by the data loader. reset starts an epoch, with a new dataset size if given.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  // Epoch, start index and this rank's position after it.
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
