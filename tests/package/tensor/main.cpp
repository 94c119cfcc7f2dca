// A program of its own that trains with DistributedDataParallel, in a world of one.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  lockstep::init_process_group();
  auto model = lockstep::DistributedDataParallel(torch::nn::Linear(4, 2));
  auto loss = model->forward(torch::ones({3, 4})).sum();
  loss.backward();
  const bool has_gradient = model->parameters().front().grad().defined();
  lockstep::destroy_process_group();
  return has_gradient ? 0 : 1;
}
