// Data-parallel training and nothing else; its symbols are what is tested (symbols.cmake).
#include <torch/torch.h>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/join/join.h"
#include "lockstep/nn/nn.h"

int main() {
  lockstep::run_threads(2, [](int) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), lockstep::SyncBatchNorm(3));
    auto model = lockstep::DistributedDataParallel(net);
    lockstep::join({*model}, [&] { model->forward(torch::ones({4, 2})).sum().backward(); });
  });
}
