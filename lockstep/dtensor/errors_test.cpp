// What operators on sharded tensors refuse: the text names the operator, the placements and the way out, and
// nothing was sent on any rank.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/factories.h"
#include "lockstep/dtensor/random.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using testing::world;

at::Tensor counted(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).reshape(sizes);
}

// `fn` raises on this rank, with all of `parts` in its text, and starts no operation.
void expect_refused(const std::function<void()>& fn, std::initializer_list<std::string> parts,
                    ErrorKind kind = ErrorKind::kUsage) {
  const CommDebugScope scope;
  const auto failure = testing::caught(fn);
  EXPECT_EQ(scope.describe(), "none") << failure.message;
  EXPECT_EQ(failure.kind, kind) << failure.message;
  for (const auto& part : parts) {
    EXPECT_TRUE(testing::says(failure, part)) << "\"" << part << "\" is not in: " << failure.message;
  }
}

// The same calls with tensors that fit do communicate, so that the silence above means something.
void expect_sends(const std::function<void()>& fn) {
  const CommDebugScope scope;
  fn();
  EXPECT_GT(scope.total(), 0);
}

TEST(Errors, AMeshWhoseRanksDoNotAscendIsRefused) {
  world(4, [](int) {
    const DeviceMesh back("cpu", std::vector<int>{3, 2, 1, 0}), by_columns("cpu", {{0, 2}, {1, 3}}),
        down("cpu", {{2, 3}, {0, 1}});
    expect_refused(
        [&] {
          distribute_tensor(counted({4, 4}), back, {Shard(0)});
        },
        {"distribute_tensor: the ranks of the mesh, cpu [4]", "do not ascend along its dimension 0"});
    expect_refused(
        [&] {
          from_local(counted({4, 4}), down, {Shard(0), Shard(1)});
        },
        {"from_local", "do not ascend along its dimension 0", "list them in order"});
    const auto x = distribute_tensor(counted({4, 4}), by_columns, {Shard(0), Shard(1)});
    EXPECT_TRUE(full_tensor(x).equal(counted({4, 4})));
  });
}

TEST(Errors, APlainTensorBesideAShardedOneIsRefused) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = distribute_tensor(counted({4, 4}), mesh, {Shard(0)});
    const auto y = distribute_tensor(counted({4, 4}), mesh, {Shard(1)});
    const auto plain = counted({4, 4});
    const std::string way_out =
        "Distribute it (distribute_tensor, from_local), take the other's to_local(), or allow it as a "
        "replica "
        "with ImplicitReplicationScope";
    expect_refused(
        [&] { x.add(plain); },
        {"aten::add.Tensor([Shard(0)] [4, 4], plain [4, 4]): a plain tensor of 2 dimensions beside a "
         "sharded one",
         way_out});
    expect_refused([&] { plain.mm(x); }, {"aten::mm(plain [4, 4], [Shard(0)] [4, 4])", way_out});
    // x and y would have to be redistributed: the third argument is looked at before.
    expect_refused([&] { at::addmm(plain, x, y); },
                   {"aten::addmm(plain [4, 4], [Shard(0)] [4, 4], [Shard(1)] [4, 4])", way_out});
    expect_refused(
        [&] {
          at::cat({x, y, plain});
        },
        {"aten::cat([Shard(0)] [4, 4], [Shard(1)] [4, 4], plain"});
    expect_refused([&] { counted({4, 4}).add_(x); }, {"aten::add_.Tensor(plain [4, 4], [Shard(0)] [4, 4])"});
    expect_sends([&] { at::addmm(distribute_tensor(plain, mesh, {}, {.src_data_rank = {}}), x, y); });

    // As a replica it receives the whole result.
    const ImplicitReplicationScope allowed;
    auto target = counted({4, 4});
    target.add_(x);
    EXPECT_FALSE(is_dtensor(target));
    EXPECT_TRUE(target.equal(counted({4, 4}) + full_tensor(x)));
  });
}

TEST(Errors, TensorsOfTwoMeshesAreRefused) {
  world(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
    const auto x = distribute_tensor(counted({4, 4}), mesh["tp"], {Shard(0)});
    const auto y = distribute_tensor(counted({4, 4}), mesh["dp"], {Shard(1)});
    const auto z = distribute_tensor(counted({4, 4}), mesh, {Replicate(), Shard(0)});
    const std::string way_out = "use one mesh and its slices, or take full_tensor() of one and distribute it";
    expect_refused([&] { x.mm(y); }, {"aten::mm([Shard(0)] [4, 4], [Shard(1)] [4, 4])",
                                      "on two meshes, cpu [2] (tp) and cpu [2] (dp)", way_out});
    expect_refused([&] { x.add(z); }, {"aten::add.Tensor([Shard(0)] [4, 4], [Replicate(), Shard(0)] [4, 4])",
                                       "cpu [2] (tp) and cpu [2, 2] (dp, tp)", way_out});
    expect_refused([&] { at::cat({x, x, y}); }, {"aten::cat", "on two meshes", way_out});
    expect_refused([&] { distribute_tensor(x, mesh["dp"], {Shard(0)}); },
                   {"distribute_tensor: the tensor is distributed already",
                    "on mesh cpu [2] (tp), [Shard(0)]", "redistribute changes its placements"});
    // A slice is the same mesh each time it is taken.
    expect_sends([&] { x.mm(distribute_tensor(counted({4, 4}), mesh["tp"], {Shard(0)})); });
  });
}

TEST(Errors, RanksOutsideAMeshCannotMakeTensorsOnIt) {
  world(3, [](int rank) {
    const DeviceMesh mesh("cpu", std::vector<int>{0, 1}, {.mesh_dim_names = {"tp"}});
    if (rank < 2) {
      EXPECT_EQ(full_tensor(distribute_tensor(counted({4}), mesh, {Shard(0)})).size(0), 4);
      return;
    }
    const std::string why = "rank 2 is not in the mesh, cpu [2] (tp); only its ranks make tensors on it";
    const std::string way_out = "Leave the call out where mesh.get_coordinate() is empty";
    expect_refused([&] { distribute_tensor(counted({4}), mesh, {Shard(0)}); },
                   {"distribute_tensor with [Shard(0)]: " + why, way_out});
    expect_refused([&] { from_local(counted({4}), mesh, {Partial()}); },
                   {"from_local with [Partial(sum)]: " + why, way_out});
    expect_refused([&] { dtensor::zeros({4}, mesh, {Shard(0)}); },
                   {"zeros with [Shard(0)]: " + why, way_out});
    expect_refused([&] { manual_seed(1, mesh); }, {"manual_seed: " + why, way_out});
  });
}

TEST(Errors, AnInPlaceWriteToAViewThatLostItsBaseIsRefused) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = distribute_tensor(counted({4, 4}), mesh, {Shard(0)});
    const auto before = full_tensor(x).clone();
    const std::string why =
        "in-place write to a view whose base was redistributed to make it: the write would not reach the "
        "base";
    const std::string way_out =
        "Clone the view first, or redistribute the base so that the view needs no communication";
    auto row = x.select(0, 1);  // exchanged between the ranks
    expect_refused([&] { row.add_(1); }, {"aten::add_.", "([Shard(0)] [4]", why, way_out});
    expect_refused([&] { row.view({2, 2}).zero_(); }, {"aten::zero_([Shard(0)] [2, 2])", why, way_out});
    auto rows = x.slice(0, 1, 3);
    const auto others = x.slice(0, 0, 2);
    expect_refused([&] { rows.copy_(others); },
                   {"aten::copy_([Shard(1)] [2, 4], [Shard(1)] [2, 4])", why, way_out});
    expect_refused([&] { rows.normal_(); }, {"aten::normal_(", why, way_out});
    EXPECT_TRUE(full_tensor(x).equal(before));
    row.clone().add_(1);
    auto column = x.select(1, 1);  // needs no communication: still a view
    column.add_(1);
    EXPECT_TRUE(full_tensor(x).select(1, 1).equal(before.select(1, 1) + 1));
  });
}

TEST(Errors, RandomOperatorsWithoutASeedAreRefused) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = from_local(counted({4, 4}).div(16), mesh, {Partial(ReduceOp::kAvg)});
    const auto y = distribute_tensor(counted({4, 4}), mesh, {Shard(0)});
    const std::string why = "random numbers of a sharded tensor need a seed that all ranks of the mesh share";
    const std::string way_out = "call lockstep::manual_seed(seed, mesh) on each of them first";
    expect_refused([&] { at::bernoulli(x); }, {"aten::bernoulli([Partial(avg)] [4, 4])", why, way_out});
    expect_refused([&] { at::dropout(y, 0.5, true); },
                   {"aten::bernoulli_.float([Shard(0)] [4, 4])", why, way_out});
    expect_refused([&] { at::native_dropout(y, 0.5, true); },
                   {"aten::native_dropout([Shard(0)] [4, 4])", why, way_out});
    expect_refused([&] { at::rand_like(y); }, {"aten::uniform_([Shard(0)] [4, 4])", why, way_out});
    expect_refused([&] { at::randn_like(y); }, {"aten::normal_([Shard(0)] [4, 4])", why, way_out});
    expect_refused([&] { at::randint_like(y, 9); }, {"aten::random_", "[Shard(0)] [4, 4])", why, way_out});
    expect_refused(
        [&] {
          dtensor::rand({4, 4}, mesh, {Shard(1)});
        },
        {"aten::uniform_([Shard(1)] [4, 4])", why, way_out});
    manual_seed(3, mesh);
    expect_sends([&] { at::bernoulli(x); });
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    manual_seed(3, mesh);
    EXPECT_TRUE(full_tensor(at::rand_like(y)).equal(at::empty({4, 4}).uniform_(0, 1, generator)));
  });
}

TEST(Errors, ATensorWithoutMemoryCannotBeResized) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = distribute_tensor(counted({4, 4}), mesh, {Shard(0)});
    expect_refused(
        [&] {
          x.resize_({2, 8});
        },
        {"aten::resize_([Shard(0)] [4, 4])", "no memory of its own", "use to_local()"});
  });
}

}  // namespace
}  // namespace lockstep
