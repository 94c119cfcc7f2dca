// Redistributions that are left running: the call returns while other ranks have not begun, and the first use
// waits for them.
#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "lockstep/dtensor/dtensor_testing.h"

namespace lockstep {
namespace {

using testing::expect_whole;
using testing::waves;
using testing::world;

struct Move {
  Placement from, to;
};
const std::vector<Move> kMoves{
    {Shard(0), Replicate()},   // all_gather
    {Shard(1), Replicate()},   // all_gather of pieces that are not dense in the whole
    {Shard(0), Shard(1)},      // all_to_all
    {Partial(), Replicate()},  // all_reduce
    {Partial(), Shard(0)},     // reduce_scatter
    {Partial(), Shard(1)}};

// Twice the numbers, made of pieces without communication.
at::Tensor source(const DeviceMesh& mesh, const Placement& placement) {
  if (placement.is_partial()) return from_local(waves({6, 4}), mesh, {placement});
  return distribute_tensor(waves({6, 4}) * 2, mesh, {placement}, {.src_data_rank = {}});
}

using Use = std::function<at::Tensor(const at::Tensor&)>;

// Rank 1 does not begin before rank 0 has its result, nor, for a moment, while rank 0 uses it.
void expect_pending(const Move& move, const Use& use, const std::string& what) {
  using std::chrono::milliseconds;
  std::promise<void> returned, used;
  world(2, [&](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = source(mesh, move.from);
    at::Tensor y, z;
    if (rank == 0) {
      y = redistribute(x, {move.to}, {.async_op = true});
      returned.set_value();
      z = use(y);
      used.set_value();
    } else {
      // Bounded, so that a call that waits for this rank ends as a failure.
      EXPECT_EQ(returned.get_future().wait_for(milliseconds(30'000)), std::future_status::ready)
          << what << ": the call waits for rank 1";
      EXPECT_EQ(used.get_future().wait_for(milliseconds(50)), std::future_status::timeout)
          << what << ": used before rank 1 has sent anything";
      y = redistribute(x, {move.to}, {.async_op = true});
      z = use(y);
    }
    EXPECT_EQ(placements(y), Placements{move.to});
    expect_whole(to_local(y), to_local(distribute_tensor(waves({6, 4}) * 2, mesh, {move.to})), what);
    expect_whole(z, to_local(distribute_tensor(waves({6, 4}) * 2 + 1, mesh, {move.to})), what + " used");
  });
}

TEST(Pending, ARedistributionReturnsBeforeTheOthersBeginAndItsFirstUseWaits) {
  for (const auto& move : kMoves) {
    const auto what = to_string(move.from) + " -> " + to_string(move.to);
    expect_pending(
        move, [](const at::Tensor& y) { return to_local(y) + 1; }, what + ", to_local");
    expect_pending(
        move, [](const at::Tensor& y) { return to_local(y + 1); }, what + ", an operator");
    if (::testing::Test::HasFailure()) return;  // every further one would wait as long
  }
}

// A tensor that shares the piece waits as well, and so does one that an operator made a view of.
TEST(Pending, WhatSharesThePieceWaitsToo) {
  expect_pending(
      kMoves[0], [](const at::Tensor& y) { return to_local(y.detach()) + 1; }, "detached");
  expect_pending(
      kMoves[0], [](const at::Tensor& y) { return to_local(y.t()).t() + 1; }, "a view");
}

// Through the graph: the gradient comes back over a tensor that was still pending when it was used.
TEST(Pending, GradientsOfAPendingTensorAreThoseOfOneProcess) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto one = waves({6, 4}).requires_grad_();
    one.pow(3).sum().backward();
    const auto many = distribute_tensor(one.detach(), mesh, {Shard(0)}).requires_grad_();
    full_tensor(redistribute(many, {Shard(1)}, {.async_op = true}).pow(3).sum()).backward();
    EXPECT_EQ(placements(many.grad()), Placements{Shard(0)});
    expect_whole(many.grad(), one.grad(), "gradient");
  });
}

}  // namespace
}  // namespace lockstep
