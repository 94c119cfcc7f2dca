// Pieces in and out: whose values a tensor gets, what from_local compares, to_local's gradients, strides.
#include <gtest/gtest.h>

#include "lockstep/base/detail/text.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/collective/objects.h"
#include "lockstep/dtensor/dtensor_testing.h"

namespace lockstep {
namespace {

using testing::expect_whole;
using testing::waves;
using testing::world;

// Each rank's piece of the result is its part of a sum over the rows. One process has the sum itself.
TEST(ToLocal, OfAPartialTensorTakesEachRanksGradientForTheWholeOne) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto one = waves({5, 4}).requires_grad_();
    const auto weight = waves({4}, 1);
    (one.sum(0) * weight).sum().backward();
    const auto many = distribute_tensor(one.detach(), mesh, {Shard(0)}).requires_grad_();
    const auto sum = many.sum(0);
    ASSERT_EQ(placements(sum), Placements{Partial()});
    const auto part = to_local(sum);
    expect_whole(part, one.detach().narrow(0, 2 * rank, rank == 2 ? 1 : 2).sum(0), "part");
    const CommDebugScope scope;
    (part * weight).sum().backward();
    EXPECT_EQ(scope.describe(), "none");
    expect_whole(many.grad(), one.grad(), "gradient");
  });
}

TEST(ToLocal, OfAPartialTensorAddsUpGradientsThatAreSaidToBePartial) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto weight = [](int r) { return waves({4}, r); };
    const auto one = waves({5, 4}).requires_grad_();
    (one.sum(0) * (weight(0) + weight(1) + weight(2))).sum().backward();
    const auto many = distribute_tensor(one.detach(), mesh, {Shard(0)}).requires_grad_();
    // Every rank differentiates a term of its own.
    const auto part = to_local(many.sum(0), {.grad_placements = Placements{Partial()}});
    (part * weight(rank)).sum().backward();
    expect_whole(many.grad(), one.grad(), "gradient");
  });
}

// On two dimensions of a mesh: the partial one is meant, the sharded one stays.
TEST(ToLocal, OfAPartialTensorOnTwoDimensionsKeepsTheShards) {
  world(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const auto one = waves({5, 3}).requires_grad_();
    const auto weight = waves({3}, 1);
    (one.sum(0) * weight).sum().backward();
    const auto many = distribute_tensor(one.detach(), mesh, {Shard(0), Shard(1)}).requires_grad_();
    const auto sum = many.sum(0);
    ASSERT_EQ(placements(sum), (Placements{Partial(), Shard(0)}));
    const auto own = to_local(distribute_tensor(weight, mesh, {Replicate(), Shard(0)}));
    (to_local(sum) * own).sum().backward();
    expect_whole(many.grad(), one.grad(), "gradient");
  });
}

TEST(DistributeTensor, SendsTheValuesOfTheRankThatItIsTold) {
  world(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const auto values = [](int r) { return waves({5, 3}, r); };
    const Placements kinds{Replicate(), Shard(0), Shard(1)};
    for (const auto& a : kinds) {
      for (const auto& b : kinds) {
        // The rank at [1, 1] of the mesh: `src` along each dimension.
        const auto x = distribute_tensor(values(rank), mesh, {a, b}, {.src_data_rank = 1});
        expect_whole(x, values(3), describe(x));
        expect_whole(to_local(x), to_local(distribute_tensor(values(3), mesh, {a, b}, {.src_data_rank = {}})),
                     describe(x));
      }
    }
    testing::refused([&] { distribute_tensor(values(0), mesh, {}, {.src_data_rank = 2}); },
                     "src_data_rank 2 on a mesh dimension of 2 ranks");
  });
}

TEST(DistributeTensor, CutsItsOwnPieceAndSendsNothingWithoutASourceRank) {
  world(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const auto mine = waves({5, 3}, rank);
    const CommDebugScope scope;
    const auto x = distribute_tensor(mine, mesh, {Shard(0), Shard(1)}, {.src_data_rank = {}});
    const auto y = distribute_tensor(mine, mesh, {Replicate(), Shard(0)}, {.src_data_rank = {}});
    EXPECT_EQ(scope.describe(), "none");
    const auto rows = mine.narrow(0, rank / 2 * 3, rank / 2 == 0 ? 3 : 2);
    expect_whole(to_local(x), rows.narrow(1, rank % 2 * 2, rank % 2 == 0 ? 2 : 1), "x");
    expect_whole(to_local(y), mine.narrow(0, rank % 2 * 3, rank % 2 == 0 ? 3 : 2), "y");
    EXPECT_FALSE(to_local(x).is_alias_of(mine));
  });
}

// Over three ranks the pieces of four and of two differ in size, and some have one row: their own strides do
// not tell in which order the dimensions lie.
TEST(Strides, AreThoseOfOneProcess) {
  for (const int n : {2, 3}) {
    world(n, [n](int rank) {
      const auto mesh = init_device_mesh("cpu", {n});
      const auto expect = [&](const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
        EXPECT_EQ(actual.strides(), expected.strides())
            << what << " rank " << rank << " " << describe(actual);
        EXPECT_EQ(actual.is_contiguous(), expected.is_contiguous()) << what;
        expect_whole(actual, expected, what);
      };
      const DistributeOptions here{.src_data_rank = {}};
      const auto matrix = waves({4, 2}), picture = waves({2, 4, 6, 3});
      const auto last = picture.contiguous(at::MemoryFormat::ChannelsLast);
      const auto columns = waves({4, 8}).slice(1, 0, 8, 4);  // with gaps: a copy has none
      for (std::int64_t d = 0; d < 2; ++d) {
        const Placements cut{Shard(d)};
        const auto what = to_string(cut);
        expect(distribute_tensor(matrix, mesh, cut).t(), matrix.t(), what + " transposed after");
        expect(distribute_tensor(matrix.t(), mesh, cut, here), matrix.t(), what + " transposed before");
        expect(distribute_tensor(matrix.t(), mesh, cut, here).t(), matrix, what + " transposed twice");
        expect(distribute_tensor(last, mesh, cut, here), last, what + " channels last");
        expect(distribute_tensor(columns.t(), mesh, cut, here), columns.t().clone(), what + " gaps");
        expect(distribute_tensor(picture, mesh, cut).permute({2, 0, 3, 1}), picture.permute({2, 0, 3, 1}),
               what + " permuted");
      }
    });
  }
}

// The ranks' tensors may lie in memory as they like, since only one of them has the values.
TEST(Strides, OfATensorThatWasSentAreContiguousOnAllRanks) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto whole = waves({2, 4}).t();
    const auto mine = rank == 1 ? whole : at::zeros({4, 2});
    for (const Placement& placement : {Placement(), Placement(Shard(0)), Placement(Shard(1))}) {
      const auto x = distribute_tensor(mine, mesh, {placement}, {.src_data_rank = 1});
      EXPECT_EQ(x.strides(), at::IntArrayRef({2, 1})) << describe(x);
      expect_whole(x, whole, describe(x));
    }
  });
}

// What every rank of a mesh raises when `local` is what it passes: the same text on all of them, and no rank
// is left waiting.
void expect_all_raise(const DeviceMesh& mesh, const at::Tensor& local, const Placements& placements,
                      FromLocalOptions options, std::initializer_list<std::string> parts) {
  options.run_check = true;
  const auto failure = testing::caught([&] { from_local(local, mesh, placements, options); });
  EXPECT_EQ(failure.kind, ErrorKind::kUsage);
  for (const auto& part : parts)
    EXPECT_TRUE(testing::says(failure, part)) << "\"" << part << "\" is not in: " << failure.message;
  std::vector<std::string> texts(4);
  all_gather_object(texts, failure.message);
  for (const auto& text : texts) EXPECT_EQ(text, failure.message);
}

TEST(FromLocal, AWrongPieceOnOneRankIsSaidByAllRanksWithTheRankInTheText) {
  world(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const auto bad = [&](int r) { return rank == r; };
    const FromLocalOptions shape{.shape = {{5, 3}}, .stride = {{3, 1}}};
    const Placements cut{Shard(0), Shard(1)};
    const auto piece = [&](std::int64_t more) {
      return waves({rank < 2 ? 3 : 2, (rank % 2 == 0 ? 2 : 1) + more});
    };
    // All right: the pieces differ in size, as the shape says.
    auto checked = shape;
    checked.run_check = true;
    EXPECT_EQ(from_local(piece(0), mesh, cut, checked).sizes(), at::IntArrayRef({5, 3}));
    for (const int r : {0, 2, 3}) {
      expect_all_raise(
          mesh, piece(bad(r) ? 1 : 0), cut, shape,
          {"from_local: shape [5, 3] with [Shard(0), Shard(1)]", base::cat("rank ", r, ", at [")});
    }
    // The number of dimensions, which the placements are checked against before anything else.
    expect_all_raise(mesh, bad(3) ? waves({2}) : piece(0), cut, shape, {"rank 3, at [1, 1] of the mesh"});
    expect_all_raise(mesh, bad(1) ? waves({3, 2}).to(at::kDouble) : waves({3, 2}), cut, {},
                     {"differ in type or sizes", "rank 1, at [0, 1] of the mesh, has Double [3, 2]",
                      "rank 0, at [0, 0] of the mesh, Float [3, 2]"});
    expect_all_raise(mesh, waves({bad(2) ? 4 : 3, 2}), cut, {}, {"rank 2, at [1, 0] of the mesh"});
    // What they say about the whole.
    const FromLocalOptions taller{.shape = {{6, 3}}, .stride = {{3, 1}}};
    expect_all_raise(mesh, waves({3, 2}), cut, bad(1) ? taller : shape, {"rank 1, at [0, 1] of the mesh"});
    expect_all_raise(mesh, piece(0), cut, bad(2) ? FromLocalOptions{} : shape,
                     {"rank 2, at [1, 0] of the mesh"});
    // And the mesh still works.
    expect_whole(distribute_tensor(waves({5, 3}), mesh, cut), waves({5, 3}), "afterwards");
  });
}

TEST(Strides, OfATensorMadeOfPiecesFollowThePieces) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = waves({6, 4}).t();  // [4, 6], strides 1 and 4
    for (std::int64_t d = 0; d < 2; ++d) {
      // Pieces that lie as the whole does, by columns.
      const auto piece = whole.chunk(2, d)[static_cast<std::size_t>(rank)].t().contiguous().t();
      const auto x = from_local(piece, mesh, {Shard(d)});
      EXPECT_EQ(x.strides(), whole.strides()) << d;
      EXPECT_EQ(to_local(x).strides(), piece.strides()) << d;
      expect_whole(x, whole, "given pieces");
      // And what the caller says.
      const auto y = from_local(piece, mesh, {Shard(d)}, {.shape = {{4, 6}}, .stride = {{6, 1}}});
      EXPECT_EQ(y.strides(), at::IntArrayRef({6, 1})) << d;
      expect_whole(y, whole, "given strides");
    }
  });
}

}  // namespace
}  // namespace lockstep
