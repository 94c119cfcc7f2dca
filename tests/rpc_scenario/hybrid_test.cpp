// Trainers that share a sparse and a dense part on another worker: distributed autograd through RPC, with DDP
// around nothing, around one layer, or around the whole model. Six processes: trainers 0 to 3, the remote
// worker 4, and the master 5.
//
// Every example has one of the opposite sign, so that averaged gradients are exactly zero and local ones are
// not.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "tests/rpc_scenario/scenario.h"

namespace lockstep::scenario {
namespace {

constexpr int kTrainers = 4, kRemote = 4, kMaster = 5, kWorld = 6;
constexpr int kRows = 2, kSparse = 3, kDense = 2, kHidden = 3, kOut = 1;

enum class DdpMode : int { kNone, kInside, kOutside };

torch::nn::Linear lin(std::int64_t in, std::int64_t out) {
  torch::nn::Linear layer(torch::nn::LinearOptions(in, out).bias(false));
  const torch::NoGradGuard no_grad;
  layer->weight.fill_(1);
  layer->weight[0][0] = -1;
  return layer;
}

// ---- on the remote worker ----

std::atomic<bool> delayed{false};
void set_delayed(bool on) {
  delayed = on;
}
LOCKSTEP_RPC_FUNCTION(set_delayed);

// Of functions that run for others, on whatever thread.
void maybe_delay() {
  thread_local Delays delay(static_cast<int>(std::hash<std::thread::id>()(std::this_thread::get_id())));
  if (delayed) delay();
}

class RemoteEm {
 public:
  RemoteEm(int rows, int width) : bag_(torch::nn::EmbeddingBagOptions(rows, width).mode(torch::kMean)) {
    const torch::NoGradGuard no_grad;
    bag_->weight.fill_(0.5);
  }
  // One index per bag.
  at::Tensor forward(const at::Tensor& indices) {
    maybe_delay();
    return bag_->forward(indices, torch::arange(indices.size(0)));
  }

 private:
  torch::nn::EmbeddingBag bag_;
};
LOCKSTEP_RPC_CLASS(RemoteEm, int, int);
LOCKSTEP_RPC_METHOD(&RemoteEm::forward);

class RemoteNet {
 public:
  RemoteNet(int in, int out) : fc_(lin(in, out)) {}
  at::Tensor forward(const at::Tensor& input) {
    maybe_delay();
    return torch::relu(fc_->forward(input));
  }

 private:
  torch::nn::Linear fc_;
};
LOCKSTEP_RPC_CLASS(RemoteNet, int, int);
LOCKSTEP_RPC_METHOD(&RemoteNet::forward);

// ---- on the trainers ----

struct Features {
  at::Tensor dense, sparse, values;
};
auto lockstep_fields(SelfOf<Features> auto& self) {
  return std::tie(self.dense, self.sparse, self.values);
}

struct Gradients {
  std::vector<at::Tensor> ddp, others;
  double loss = 0;
};
auto lockstep_fields(SelfOf<Gradients> auto& self) {
  return std::tie(self.ddp, self.others, self.loss);
}

struct HybridImpl : torch::nn::Module {
  HybridImpl(rpc::RRef<RemoteEm> em, rpc::RRef<RemoteNet> net, const Group& group_of_fc2)
      : em_(std::move(em)), net_(std::move(net)) {
    fc1_ = register_module("fc1", lin(kDense, kDense));
    fc2_ = register_module("fc2", lin(kHidden, kOut));
    if (group_of_fc2) fc2_ddp_ = DistributedDataParallel(fc2_, {.group = group_of_fc2});
  }
  at::Tensor forward(const at::Tensor& dense, const at::Tensor& sparse) {
    const at::Tensor embedded = em_.rpc_sync(&RemoteEm::forward, {sparse});
    const at::Tensor input = torch::cat({fc1_->forward(dense), embedded}, 1);
    const at::Tensor hidden = net_.rpc_sync(&RemoteNet::forward, {input});
    return fc2_ddp_ ? fc2_ddp_->forward(hidden) : fc2_->forward(hidden);
  }

  rpc::RRef<RemoteEm> em_;
  rpc::RRef<RemoteNet> net_;
  torch::nn::Linear fc1_{nullptr}, fc2_{nullptr};
  DistributedDataParallel<torch::nn::LinearImpl> fc2_ddp_{nullptr};
};
TORCH_MODULE(Hybrid);

class Trainer {
 public:
  Trainer(const rpc::RRef<RemoteEm>& em, const rpc::RRef<RemoteNet>& net, DdpMode mode) {
    if (mode != DdpMode::kNone) group_ = new_group({0, 1, 2, 3});
    net_ = Hybrid(em, net, mode == DdpMode::kInside ? group_ : Group());
    const std::vector fc1 = net_->fc1_->parameters(), fc2 = net_->fc2_->parameters();
    (mode == DdpMode::kOutside ? in_ddp_ : others_) = fc1;
    auto& place = mode == DdpMode::kNone ? others_ : in_ddp_;
    place.insert(place.end(), fc2.begin(), fc2.end());
    if (mode == DdpMode::kOutside) ddp_ = DistributedDataParallel(net_, {.group = group_});
  }

  Gradients train_batch(const Features& batch, bool uneven, bool has_fewer) {
    const Gradients gradients =
        uneven ? train_parts(batch, has_fewer) : train(batch.dense, batch.sparse, batch.values);
    for (const auto& parameter : net_->parameters())
      require(!parameter.grad().defined(), "Tensor::grad() was written");
    return gradients;
  }

  void leave_group() {
    if (group_) destroy_process_group(group_);
  }

 private:
  // Those of the last part.
  Gradients train_parts(const Features& batch, bool has_fewer) {
    Gradients last;
    join({*ddp_}, [&] {
      const auto dense = batch.dense.split(2), sparse = batch.sparse.split(2);
      for (std::size_t i = 0; i < (has_fewer ? 1U : dense.size()); ++i) {
        maybe_delay();
        last = train(dense[i], sparse[i], batch.values);
      }
    });
    return last;
  }

  Gradients train(const at::Tensor& dense, const at::Tensor& sparse, const at::Tensor& values) {
    const autograd::DistAutogradContext context;
    const at::Tensor output = ddp_ ? ddp_->forward(dense, sparse) : net_->forward(dense, sparse);
    const at::Tensor loss = (output * values).sum();
    maybe_delay();
    autograd::backward(context, {loss});
    const auto all = context.gradients();
    require(all.size() == in_ddp_.size() + others_.size(), "a gradient for every parameter of this worker's");
    Gradients gradients{.loss = loss.item<double>()};
    for (const auto& parameter : in_ddp_) gradients.ddp.push_back(all.find(parameter));
    for (const auto& parameter : others_) gradients.others.push_back(all.find(parameter));
    return gradients;
  }

  Group group_;
  Hybrid net_{nullptr};
  DistributedDataParallel<HybridImpl> ddp_{nullptr};
  std::vector<at::Tensor> in_ddp_, others_;
};
LOCKSTEP_RPC_CLASS(Trainer, rpc::RRef<RemoteEm>, rpc::RRef<RemoteNet>, DdpMode);
LOCKSTEP_RPC_METHOD(&Trainer::train_batch);
LOCKSTEP_RPC_METHOD(&Trainer::leave_group);

// ---- the master ----

std::vector<Features> examples() {
  Features all{.dense = torch::zeros({16, kDense}),
               .sparse = torch::zeros({16}, torch::kLong),
               .values = torch::zeros({16})};
  int row = 0;
  for (const int value : {-1, 1}) {
    for (const int x : {-value, value}) {
      for (const int y : {value, -value}) {
        for (const int z : {0, 1}) {
          all.dense[row] = torch::tensor({static_cast<float>(x), static_cast<float>(y)});
          all.sparse[row] = z;
          all.values[row++] = value;
        }
      }
    }
  }
  std::vector<Features> parts;
  for (int k = 0; k < kTrainers; ++k) {
    const auto part = [k](const at::Tensor& tensor) {
      return tensor.slice(0, 4 * k, 4 * k + 4).contiguous();
    };
    parts.push_back({part(all.dense), part(all.sparse), part(all.values)});
  }
  return parts;
}

// What each trainer's gradients are before anything is averaged.
struct Oracle {
  double loss;
  at::Tensor fc1, fc2;
};
std::vector<Oracle> oracle() {
  const auto fc1 = [](std::vector<float> values) { return torch::tensor(values).view({2, 2}); };
  const auto fc2 = [](std::vector<float> values) { return torch::tensor(values).view({1, 3}); };
  const Oracle first{0, fc1({-32, -16, 0, -16}), fc2({-56, -28, -28})};
  const Oracle second{-56, fc1({16, -16, 16, -16}), fc2({0, -28, -28})};
  return {first, second, {56, -second.fc1, -second.fc2}, {0, -first.fc1, -first.fc2}};
}

void check(const Gradients& gradients, const Oracle& expected, DdpMode mode) {
  require(gradients.loss == expected.loss, "the loss is " + std::to_string(gradients.loss));
  require(gradients.ddp.size() == (mode == DdpMode::kNone     ? 0U
                                   : mode == DdpMode::kInside ? 1U
                                                              : 2U),
          "in DDP");
  for (const auto& gradient : gradients.ddp) require_equal(gradient, torch::zeros_like(gradient), "averaged");
  if (mode == DdpMode::kOutside) return;
  require_equal(gradients.others.at(0), expected.fc1, "fc1");
  if (mode == DdpMode::kNone) require_equal(gradients.others.at(1), expected.fc2, "fc2");
  for (const auto& gradient : gradients.others)
    require(gradient.count_nonzero().item<int>() != 0, "not all zeros");
}

std::atomic<bool> may_leave{false};
void leave() {
  may_leave = true;
}
LOCKSTEP_RPC_FUNCTION(leave);

struct Case {
  DdpMode mode;
  bool uneven = false;
  int rounds = 3;
};

void lead(const Case& test) {
  if (test.uneven) {
    for (int rank = 0; rank <= kRemote; ++rank) rpc::rpc_sync(worker(rank), set_delayed, {true});
  }
  const auto em = rpc::remote<RemoteEm>(worker(kRemote), rpc::Args{kRows, kSparse});
  const auto net = rpc::remote<RemoteNet>(worker(kRemote), rpc::Args{kDense + kSparse, kHidden});
  std::vector<rpc::RRef<Trainer>> trainers;
  for (int k = 0; k < kTrainers; ++k)
    trainers.push_back(rpc::remote<Trainer>(worker(k), rpc::Args{em, net, test.mode}));
  if (test.mode != DdpMode::kNone) new_group({0, 1, 2, 3});
  const auto batches = examples();
  const auto expected = oracle();
  for (int round = 0; round < test.rounds; ++round) {
    std::vector<rpc::Future<Gradients>> results;
    for (std::size_t k = 0; k < trainers.size(); ++k)
      results.push_back(
          trainers[k].rpc_async(&Trainer::train_batch, {batches[k], test.uneven, k < trainers.size() / 2}));
    for (std::size_t k = 0; k < results.size(); ++k) {
      const Gradients gradients = results[k].wait();
      if (!test.uneven) check(gradients, expected[k], test.mode);
    }
  }
  std::vector<rpc::Future<void>> left;
  for (const auto& trainer : trainers) left.push_back(trainer.rpc_async(&Trainer::leave_group));
  wait_all(left);
  for (int rank = 0; rank <= kRemote; ++rank) rpc::rpc_sync(worker(rank), leave);
}

void run(const Case& test) {
  run_workers(kWorld, [&](int rank, const Meeting& meeting) {
    enter_group(rank, kWorld, meeting);
    rpc::barrier();  // a trainer is called only once it is in the group
    if (rank == kMaster) {
      lead(test);
    } else {
      if (rank == kRemote && test.mode != DdpMode::kNone) new_group({0, 1, 2, 3});
      while (!may_leave) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    destroy_process_group();
  });
}

TEST(RpcScenario, WithoutDdpEveryTrainerHasItsOwnGradients) {
  run({.mode = DdpMode::kNone});
}

TEST(RpcScenario, DdpAroundTheModelAveragesGradientsOfTheContext) {
  run({.mode = DdpMode::kOutside});
}

TEST(RpcScenario, DdpInsideTheModelAveragesGradientsOfItsLayer) {
  run({.mode = DdpMode::kInside});
}

TEST(RpcScenario, DdpAroundTheModelJoinsUnevenInputsUnderDelays) {
  run({.mode = DdpMode::kOutside, .uneven = true, .rounds = 50});
}

}  // namespace
}  // namespace lockstep::scenario
