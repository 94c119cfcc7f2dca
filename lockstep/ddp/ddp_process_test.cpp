// DistributedDataParallel with ranks as processes. The test process itself runs no tensor code: it forks, and
// a fork after an OpenMP region hangs.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <atomic>
#include <csignal>
#include <stdexcept>
#include <string>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/process/spawn.h"
#include "lockstep/rendezvous/rendezvous.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

// In a rank process: what is thrown becomes the parent's SpawnError.
void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void require_same_bits_everywhere(const std::vector<at::Tensor>& tensors, int n) {
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor mine = tensor.detach().contiguous();
    std::vector<at::Tensor> all(static_cast<std::size_t>(n));
    for (at::Tensor& one : all) one = torch::empty_like(mine);
    all_gather(all, mine);
    for (const at::Tensor& one : all) require(torch::equal(one, all[0]), "parameters differ between ranks");
  }
}

template <class Impl>
void train_and_compare(int n, bool views) {
  spawn(n, [&](int rank) {
    torch::set_num_threads(1);
    const Trained alone = train_alone<Impl>(n);
    init_process_group();
    const Trained mine =
        train_rank<Impl>(rank, n, {.bucket_cap_mb = 0.0002, .gradient_as_bucket_view = views}, true);
    require_same_bits_everywhere(mine.parameters, n);
    for (std::size_t i = 0; i < alone.parameters.size(); ++i) {
      require(torch::allclose(mine.parameters[i], alone.parameters[i], 1e-4, 1e-6),
              "parameters differ from one process's");
    }
    at::Tensor losses = torch::tensor(mine.losses, torch::kDouble);
    all_reduce(losses, {.op = ReduceOp::kAvg});
    require(torch::allclose(losses, torch::tensor(alone.losses, torch::kDouble), 1e-5, 1e-6),
            "losses differ");
    destroy_process_group();
  });
}

TEST(DdpProcesses, TrainLikeOneProcess) {
  for (const int n : {2, 3}) {
    train_and_compare<MlpImpl>(n, true);
    train_and_compare<TiedImpl>(n, false);
  }
}

// The model's group is not the default one, which does not exist.
TEST(DdpProcesses, TrainOverACreatedGroup) {
  constexpr int kRanks = 2;
  spawn(kRanks, [&](int rank) {
    torch::set_num_threads(1);
    const auto place = rendezvous();
    const auto group = create_group({.store = place.store, .rank = rank, .size = kRanks, .name = "trainers"});
    const Trained alone = train_alone<MlpImpl>(kRanks);
    const Trained mine = train_rank<MlpImpl>(rank, kRanks, {.group = group, .bucket_cap_mb = 0.0002}, true);
    require(!is_initialized(), "no default world");
    for (std::size_t i = 0; i < alone.parameters.size(); ++i) {
      require(torch::allclose(mine.parameters[i], alone.parameters[i], 1e-4, 1e-6),
              "parameters differ from one process's");
    }
    destroy_process_group(group);
  });
}

// Counts in memory that parent and ranks share.
class SharedCounter {
 public:
  SharedCounter() {
    void* memory =
        ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    count_ = new (memory) std::atomic<int>(0);
  }
  ~SharedCounter() { ::munmap(count_, sizeof(std::atomic<int>)); }
  SharedCounter(const SharedCounter&) = delete;
  SharedCounter& operator=(const SharedCounter&) = delete;
  std::atomic<int>& operator*() { return *count_; }

 private:
  std::atomic<int>* count_;
};

// Ends its process as a crash would, in the middle of the backward pass.
struct Die : torch::autograd::Function<Die> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool armed) {
    context->saved_data["armed"] = armed;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (context->saved_data["armed"].toBool()) ::raise(SIGKILL);
    return {gradients[0], at::Tensor()};
  }
};

struct Mortal : torch::nn::Module {
  Mortal() {
    first = register_parameter("first", torch::ones({1000}));
    second = register_parameter("second", torch::ones({1000}));
  }
  at::Tensor forward(bool armed) { return (Die::apply(first * 2, armed) * second).sum(); }
  at::Tensor first, second;
};

TEST(DdpProcesses, ARankKilledInBackwardIsNamedByTheOthers) {
  SharedCounter n_named;
  const auto body = [&](int rank) {
    std::signal(SIGTERM, SIG_IGN);  // spawn sends it to survivors, who have something to say first
    torch::set_num_threads(1);
    init_process_group();
    auto model = DistributedDataParallel(std::make_shared<Mortal>(), {.bucket_cap_mb = 0.00001});
    for (int step = 0; step < 5; ++step) {
      const at::Tensor loss = model->forward(rank == 1 && step == 3);
      try {
        loss.backward();
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kPeerLost && error.peer() && error.peer()->rank == 1) ++*n_named;
        return;
      }
    }
  };
  try {
    spawn(3, body);
    FAIL() << "nobody noticed";
  } catch (const SpawnError& error) {
    EXPECT_EQ(error.index(), 1);
    EXPECT_EQ(error.exit_code(), 128 + SIGKILL);
  }
  EXPECT_EQ((*n_named).load(), 2);
}

}  // namespace
}  // namespace lockstep
