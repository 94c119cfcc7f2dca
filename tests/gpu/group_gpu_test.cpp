// Collectives on CUDA tensors: what they give, and how they are ordered with streams.
#include <atomic>
#include <thread>
#include <vector>

#include "tests/gpu/gpu_testing.h"

namespace lockstep {
namespace {

using namespace gpu_testing;

constexpr at::ScalarType kTypes[] = {at::kByte, at::kChar,     at::kShort, at::kInt,    at::kLong,
                                     at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kBool};
constexpr ReduceOp::Kind kOps[] = {ReduceOp::kSum, ReduceOp::kAvg,  ReduceOp::kProduct, ReduceOp::kMin,
                                   ReduceOp::kMax, ReduceOp::kBand, ReduceOp::kBor,     ReduceOp::kBxor};

// Values that every type holds, different on every rank and in every place.
at::Tensor sample(int rank, at::IntArrayRef sizes, at::ScalarType type) {
  const auto n = c10::multiply_integers(sizes);
  return torch::arange(n, at::kLong).add_(7 * rank).remainder_(5).reshape(sizes).to(type);
}

// False when an operation of this kind is refused, with the same error on CPU and GPU or only on the GPU.
bool offered(const std::function<void()>& call) {
  try {
    call();
    return true;
  } catch (const Error& error) {
    EXPECT_TRUE(error.kind() == ErrorKind::kUnsupported || error.kind() == ErrorKind::kUsage) << error.what();
    return false;
  }
}

class GroupGpu : public GpuTest {};

// The host engine reduces in rank order, as cuda_ipc does: the bits are the same. NCCL's order is its own.
TEST_F(GroupGpu, EveryReductionOfEveryTypeIsThatOfTheCpu) {
  int n_compared = 0;
  for (const auto type : kTypes) {
    for (const auto op : kOps) {
      const auto mine = sample(rank(), {1027}, type);
      auto expected = mine.clone();
      auto actual = mine.to(gpu());
      const bool on_cpu = offered([&] { all_reduce(expected, {.op = op}); });
      const bool on_gpu_too = offered([&] { all_reduce(actual, {.op = op}); });
      EXPECT_TRUE(on_cpu || !on_gpu_too) << type << " " << name_of(op);
      if (!on_cpu || !on_gpu_too) continue;
      ++n_compared;
      EXPECT_TRUE(torch::equal(actual.cpu(), expected)) << type << " " << name_of(op);
    }
  }
  EXPECT_GT(n_compared, 20);
}

TEST_F(GroupGpu, EveryCollectiveGivesWhatItGivesOnTheCpu) {
  for (const auto type : kTypes) {
    const auto mine = sample(rank(), {6, 5}, type);
    const auto check = [&](const char* what, const std::function<at::Tensor(const at::Tensor&)>& call) {
      EXPECT_TRUE(torch::equal(call(mine.to(gpu())).cpu(), call(mine.clone()))) << what << " of " << type;
    };
    check("broadcast", [](at::Tensor x) { return broadcast(x, {.src = size() - 1}), x; });
    check("all_gather_single", [](const at::Tensor& x) {
      auto all = torch::empty({6 * size(), 5}, x.options());
      all_gather_single(all, x);
      return all;
    });
    check("all_gather", [](const at::Tensor& x) {
      std::vector<at::Tensor> all(static_cast<std::size_t>(size()));
      for (auto& one : all) one = torch::empty_like(x);
      all_gather(all, x);
      return torch::stack(all);
    });
    check("gather and scatter", [](const at::Tensor& x) {
      std::vector<at::Tensor> all(static_cast<std::size_t>(rank() == 0 ? size() : 0));
      for (auto& one : all) one = torch::empty_like(x);
      gather(x, all, {.dst = 0});
      auto back = torch::empty_like(x);
      for (auto& one : all) one = one.flip({0});
      scatter(back, all, {.src = 0});
      return back;
    });
    check("all_to_all_single", [](const at::Tensor& x) {
      const auto input = x.repeat({size(), 1});
      auto output = torch::empty_like(input);
      all_to_all_single(output, input);
      return output;
    });
    check("with gaps", [](at::Tensor x) {
      auto view = x.t();
      broadcast(view, {.src = 0});
      return x;
    });
  }
}

TEST_F(GroupGpu, PartsOfUnevenSizesArrive) {
  const auto mine = torch::full({rank() + 1, 3}, rank(), on_gpu());
  std::vector<at::Tensor> all;
  for (int r = 0; r < size(); ++r) all.push_back(torch::empty({r + 1, 3}, on_gpu()));
  all_gather(all, mine);
  for (int r = 0; r < size(); ++r)
    EXPECT_TRUE(torch::equal(all[static_cast<std::size_t>(r)].cpu(), torch::full({r + 1, 3}, float(r)))) << r;
  auto sum = torch::empty({rank() + 1}, on_gpu());
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size(); ++r) parts.push_back(torch::ones({r + 1}, on_gpu()));
  reduce_scatter(sum, parts);
  EXPECT_TRUE(torch::equal(sum.cpu(), torch::full({rank() + 1}, float(size()))));
}

TEST_F(GroupGpu, CoalescedAndPremultipliedSumsAreRight) {
  std::vector<at::Tensor> tensors;
  for (int i = 1; i <= 4; ++i) tensors.push_back(torch::full({i * 100}, rank() + i, on_gpu()));
  all_reduce_coalesced(tensors, {.async_op = true}).wait();
  const int total = size() * (size() - 1) / 2;
  for (int i = 1; i <= 4; ++i)
    EXPECT_TRUE(
        torch::all(tensors[static_cast<std::size_t>(i - 1)] == float(total + i * size())).item<bool>());
  auto x = torch::ones({100}, on_gpu());
  all_reduce(x, {.op = ReduceOp::premul_sum(0.5)});
  EXPECT_TRUE(torch::all(x == 0.5F * static_cast<float>(size())).item<bool>());
}

TEST_F(GroupGpu, MessagesArriveBetweenNeighbours) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  const int next = (rank() + 1) % size(), before = (rank() + size() - 1) % size();
  const auto mine = torch::full({1000}, rank(), on_gpu());
  auto theirs = torch::empty({1000}, on_gpu());
  const auto works = batch_isend_irecv({{P2PKind::kIsend, mine, next}, {P2PKind::kIrecv, theirs, before}});
  for (const auto& work : works) work.wait();
  EXPECT_TRUE(torch::all(theirs == float(before)).item<bool>());
}

TEST_F(GroupGpu, SharedMemoryOfTheGroupIsReducedInPlace) {
  auto x = empty_shared({1 << 20}, at::kFloat, {.device = gpu()});
  EXPECT_EQ(x.device(), gpu());
  x.fill_(rank() + 1);
  all_reduce(x);
  EXPECT_TRUE(torch::all(x == float(size() * (size() + 1) / 2)).item<bool>());
}

// ---- streams (R2, R3) ----

// Fails when the engine does not wait for the stream the operation was posted in: it would read the old values.
TEST_F(GroupGpu, AnOperationComesAfterWhatItsStreamHolds) {
  for (int round = 0; round < 3; ++round) {
    auto x = torch::zeros({1 << 20}, on_gpu());
    synchronize();
    const c10::StreamGuard guard(side_stream());
    delay();
    x.fill_(rank() + 1);
    auto work = all_reduce(x, {.async_op = true});
    work.wait();
    const auto seen = x.clone();
    EXPECT_TRUE(torch::all(seen == float(size() * (size() + 1) / 2)).item<bool>()) << round;
  }
}

// Fails when wait() does not order the stream it is called in: the copy would be made of the old values.
TEST_F(GroupGpu, WaitOrdersTheStreamItIsCalledIn) {
  for (int round = 0; round < 3; ++round) {
    const auto posting = side_stream(), using_it = side_stream();
    auto x = torch::zeros({1 << 20}, on_gpu());
    auto seen = torch::empty_like(x);
    synchronize();
    Work work;
    {
      const c10::StreamGuard guard(posting);
      delay();
      x.fill_(rank() + 1);
      work = all_reduce(x, {.async_op = true});
    }
    {
      const c10::StreamGuard guard(using_it);
      work.wait();
      seen.copy_(x);
    }
    synchronize();
    EXPECT_TRUE(torch::all(seen == float(size() * (size() + 1) / 2)).item<bool>()) << round;
  }
}

// Temporaries of a tensor with gaps are copied back in the waiting stream, and live until then.
TEST_F(GroupGpu, ATensorWithGapsIsWholeInTheWaitingStream) {
  const auto posting = side_stream(), using_it = side_stream();
  auto whole = torch::zeros({512, 1024}, on_gpu());
  auto x = whole.t();
  auto seen = torch::empty_like(whole);
  synchronize();
  Work work;
  {
    const c10::StreamGuard guard(posting);
    delay();
    whole.fill_(rank() + 1);
    work = all_reduce(x, {.async_op = true});
  }
  {
    const c10::StreamGuard guard(using_it);
    work.wait();
    seen.copy_(whole);
  }
  work = {};
  synchronize();
  EXPECT_TRUE(torch::all(seen == float(size() * (size() + 1) / 2)).item<bool>());
}

TEST_F(GroupGpu, AWaitWithATimeoutBlocksTheThread) {
  auto x = torch::full({1 << 20}, rank() + 1, on_gpu());
  auto work = all_reduce(x, {.async_op = true});
  work.wait(kPatience);
  EXPECT_TRUE(work.done());
  EXPECT_TRUE(work.is_success());
  EXPECT_GE(work.duration(), 0);
}

TEST_F(GroupGpu, AFutureHasTheResultAndItsCallbacksAreOrdered) {
  auto x = torch::full({1 << 20}, rank() + 1, on_gpu());
  delay(5);
  auto work = all_reduce(x, {.async_op = true});
  auto doubled = work.get_future()->then(
      [](c10::ivalue::Future& done) { return c10::IValue(done.value().toTensorList().get(0) * 2); },
      c10::TensorType::get());
  doubled->wait();
  EXPECT_TRUE(torch::all(doubled->value().toTensor() == float(size() * (size() + 1))).item<bool>());
}

// A dropped Work goes on, and its tensors live as long as it does.
TEST_F(GroupGpu, DroppedWorksKeepTheirTensors) {
  for (int i = 0; i < 50; ++i) {
    auto x = torch::full({1 << 18}, 1.0, on_gpu());
    all_reduce(x, {.async_op = true});
  }
  auto last = torch::ones({10}, on_gpu());
  all_reduce(last);
  EXPECT_TRUE(torch::all(last == float(size())).item<bool>());
}

// A stream that waits for a late rank must not stop this process: memory is freed and kernels are loaded that were
// never used before while the operation is pending. The last rank is late on purpose.
TEST_F(GroupGpu, FreeingMemoryAndLoadingKernelsWhileAStreamWaitsDoNotHang) {
  auto x = torch::ones({1 << 20}, on_gpu());
  auto other = torch::rand({333, 77}, on_gpu());
  synchronize();
  if (rank() == size() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  auto work = all_reduce(x, {.async_op = true});
  work.wait();
  const auto rare = torch::erfinv(other * 0.5).cumsum(0);  // kernels that nothing else here uses
  c10::GetAllocator(c10::kCUDA);
  EXPECT_TRUE(torch::all(torch::isfinite(rare)).item<bool>());
  EXPECT_TRUE(torch::all(x == float(size())).item<bool>());
}

TEST_F(GroupGpu, SubgroupsWorkBesideTheWorld) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  std::vector<int> members;
  for (int r = 0; r < size(); r += 2) members.push_back(r);
  const auto some = new_group(members);
  auto x = torch::ones({100}, on_gpu());
  if (rank() % 2 == 0) all_reduce(x, {.group = some});
  auto y = torch::ones({100}, on_gpu());
  all_reduce(y);
  EXPECT_TRUE(torch::all(y == float(size())).item<bool>());
  EXPECT_TRUE(torch::all(x == float(rank() % 2 == 0 ? members.size() : 1)).item<bool>());
}

TEST_F(GroupGpu, ObjectsAndBarriersNeedNoGpu) {
  barrier();
  std::vector<std::string> all(static_cast<std::size_t>(size()));
  all_gather_object(all, "rank " + std::to_string(rank()));
  ASSERT_EQ(static_cast<int>(all.size()), size());
  EXPECT_EQ(all.back(), "rank " + std::to_string(size() - 1));
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::gpu_testing::run_all(argc, argv);
}
