// A convolutional network learns to tell patterns of stripes apart. Batches per rank are small, too small for
// good statistics, so its batch normalisation works on the batches of all ranks together (SyncBatchNorm).
//
//   lockstep run -n 2 -- build/dev/examples/image_classifier
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>

#include "examples/ranks_equal.h"

namespace {

constexpr std::int64_t kSize = 16, kClasses = 4;

// Stripes in one of four directions under noise; image i is the same in every process.
class Stripes : public torch::data::datasets::Dataset<Stripes> {
 public:
  torch::data::Example<> get(std::size_t index) override {
    const auto label = static_cast<std::int64_t>(index) % kClasses;
    const double angle = 3.14159 * static_cast<double>(label) / kClasses;
    const auto noise = at::randn({1, kSize, kSize}, at::detail::createCPUGenerator(index), at::kFloat);
    const auto x = torch::arange(kSize).to(torch::kFloat);
    const auto across = x.unsqueeze(1) * std::sin(angle) + x.unsqueeze(0) * std::cos(angle);
    return {torch::sin(1.5 * across).unsqueeze(0) + 0.7 * noise, torch::tensor(label)};
  }
  torch::optional<std::size_t> size() const override { return 512; }
};

torch::nn::Sequential make_net() {
  using torch::nn::Conv2d, torch::nn::Conv2dOptions;
  return torch::nn::Sequential(Conv2d(Conv2dOptions(1, 8, 3).padding(1)), torch::nn::BatchNorm2d(8),
                               torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                               Conv2d(Conv2dOptions(8, 16, 3).padding(1)), torch::nn::BatchNorm2d(16),
                               torch::nn::ReLU(), torch::nn::AdaptiveMaxPool2d(1), torch::nn::Flatten(),
                               torch::nn::Linear(16, kClasses));
}

int train() {
  lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  torch::manual_seed(1);

  auto net = make_net();
  lockstep::convert_sync_batchnorm(net);  // every BatchNorm in the Sequential
  auto model = lockstep::DistributedDataParallel(net);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));

  lockstep::DistributedSampler sampler(Stripes().size().value());
  auto loader = torch::data::make_data_loader(Stripes().map(torch::data::transforms::Stack<>()), sampler, 4);
  for (std::size_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(epoch);
    at::Tensor loss_and_hits = torch::zeros({2});
    for (const auto& batch : *loader) {
      optimizer.zero_grad();
      const auto scores = model->forward(batch.data);
      const auto loss = torch::nn::functional::cross_entropy(scores, batch.target);
      loss.backward();
      optimizer.step();
      loss_and_hits +=
          torch::stack({loss.detach() * batch.data.size(0), (scores.argmax(1) == batch.target).sum()});
    }
    lockstep::all_reduce(loss_and_hits);
    loss_and_hits /= static_cast<double>(sampler.size()) * lockstep::get_world_size();
    const float loss = loss_and_hits[0].item<float>(), accuracy = loss_and_hits[1].item<float>();
    if (rank == 0) std::printf("epoch %zu  loss %.3f  right %.0f %%\n", epoch, loss, 100 * accuracy);
    if (epoch == 1 && accuracy < 0.85) return 1;
  }
  const bool equal = ranks_equal(*net);
  if (rank == 0)
    std::printf("%s\n", equal ? "it learnt; all ranks hold the same network" : "the ranks differ");
  lockstep::destroy_process_group();
  return equal ? 0 : 1;
}

}  // namespace

int main() {
  return lockstep::run_main(train);
}
