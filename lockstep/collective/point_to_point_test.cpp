// Messages between ranks that are threads.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <string>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

at::Tensor filled(std::int64_t numel, double value) {
  return at::full({numel}, value);
}

TEST(SendRecv, MovesEveryTypeFromRankToRank) {
  for (const int n : {2, 3, 4, 7, 8}) {
    world(n, [n](int rank) {
      const at::ScalarType types[] = {at::kFloat, at::kBool,         at::kHalf,
                                      at::kShort, at::kComplexFloat, at::kFloat8_e5m2};
      for (const auto dtype : types) {
        const auto message = [&](int r) { return sample(r, {3, 4}, at::kInt).to(dtype); };
        // Around the ring: even ranks send first, so a blocking pair always meets.
        const int next = (rank + 1) % n, last = (rank + n - 1) % n;
        auto came = at::empty({4, 3}, dtype).t();  // not contiguous
        const auto sending = isend(message(rank).t().contiguous().t(), {.dst = next, .tag = 5});
        EXPECT_EQ(recv(came, {.src = last, .tag = 5}), last);
        EXPECT_TRUE(sending.wait());
        EXPECT_TRUE(sending.done());
        expect_equal(came.to(at::kFloat), message(last).to(at::kFloat), c10::toString(dtype));
      }
    });
  }
}

TEST(SendRecv, MovesSizesFromNothingToMegabytes) {
  world(2, [](int rank) {
    for (const std::int64_t numel : {0, 1, 1000, 100'000, 3'000'000}) {
      if (rank == 0) {
        const auto message = at::arange(numel, at::kFloat);
        send(message, {.dst = 1});
        send(message, {.group_dst = 1});
      } else {
        auto first = at::empty({numel}), second = at::empty({numel});
        EXPECT_EQ(recv(first, {.src = 0}), 0);
        const auto work = irecv(second, {.group_src = 0});
        work.wait();
        EXPECT_EQ(work.source_rank(), 0);
        EXPECT_EQ(work.op_type(), OpType::kRecv);
        expect_equal(first, at::arange(numel, at::kFloat));
        expect_equal(second, first);
      }
    }
  });
}

TEST(SendRecv, KeepsTheOrderOfEqualTagsAndMatchesOthersByTag) {
  world(2, [](int rank) {
    constexpr int kMessages = 20;
    std::vector<Work> works;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < kMessages; ++i) {
      tensors.push_back(filled(10, rank == 0 ? i : -1));
      if (rank == 0) works.push_back(isend(tensors.back(), {.dst = 1, .tag = i % 2}));
    }
    if (rank == 1) {
      // The odd tag first: its messages wait for nobody else's.
      for (const int tag : {1, 0}) {
        for (int i = tag; i < kMessages; i += 2) {
          auto& tensor = tensors[static_cast<std::size_t>(i)];
          recv(tensor, {.src = 0, .tag = tag});
          expect_equal(tensor, filled(10, i));
        }
      }
    }
    for (const auto& work : works) work.wait();
  });
}

TEST(SendRecv, FromAnyRankSaysWhoSent) {
  for (const int n : {2, 3, 4, 7}) {
    world(n, [n](int rank) {
      if (rank != 0) {
        send(filled(3, rank), {.dst = 0, .tag = 2});
        send(filled(3, -rank), {.dst = 0, .tag = 3});
        return;
      }
      std::vector<bool> seen(static_cast<std::size_t>(n)), again = seen;
      for (int i = 1; i < n; ++i) {
        auto tensor = at::empty({3});
        const int source = recv(tensor, {.tag = 2}).value();
        ASSERT_TRUE(source > 0 && source < n);
        EXPECT_FALSE(seen[static_cast<std::size_t>(source)]);
        seen[static_cast<std::size_t>(source)] = true;
        expect_equal(tensor, filled(3, source));
      }
      for (int i = 1; i < n; ++i) {
        auto tensor = at::empty({3});
        const auto work = irecv(tensor, {.tag = 3});
        EXPECT_EQ(work.op_type(), OpType::kRecvAnySource);
        work.wait();
        again[static_cast<std::size_t>(work.source_rank())] = true;
        expect_equal(tensor, filled(3, -work.source_rank()));
      }
      for (int r = 1; r < n; ++r) EXPECT_TRUE(again[static_cast<std::size_t>(r)]);
    });
  }
}

TEST(SendRecv, StandsBesideTheOrderOfCollectives) {
  world(2, [](int rank) {
    auto late = at::zeros({4});
    const auto receiving = rank == 0 ? irecv(late, {.src = 1}) : Work();
    auto sum = at::ones({4});
    all_reduce(sum);  // a receive that nobody has met holds nothing up
    expect_equal(sum, filled(4, 2));
    if (rank == 1) send(filled(4, 7), {.dst = 0});
    receiving.wait();
    if (rank == 0) expect_equal(late, filled(4, 7));
  });
}

TEST(SelfSend, WorksWithoutBlockingAndIsRefusedWithIt) {
  for (const int n : {1, 2, 3}) {
    world(n, [](int rank) {
      auto came = at::zeros({5}), second = at::zeros({5});
      const auto receiving = irecv(came, {.src = rank, .tag = 4});
      const auto sending = isend(filled(5, rank + 1), {.dst = rank, .tag = 4});
      sending.wait();
      receiving.wait();
      EXPECT_EQ(receiving.source_rank(), rank);
      expect_equal(came, filled(5, rank + 1));
      // The send first, another tag in between.
      const auto other = isend(filled(5, 8), {.dst = rank, .tag = 1});
      const auto early = isend(filled(5, 9), {.dst = rank});
      irecv(second, {.src = rank}).wait();
      expect_equal(second, filled(5, 9));
      auto last = at::zeros({5});
      irecv(last, {.src = rank, .tag = 1}).wait();
      expect_equal(last, filled(5, 8));
      other.wait();
      early.wait();
      const auto to = caught([&] { send(came, {.dst = rank}); });
      EXPECT_EQ(to.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(to, "isend")) << to.message;
      const auto from = caught([&] { recv(came, {.src = rank}); });
      EXPECT_EQ(from.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(from, "irecv")) << from.message;
    });
  }
}

TEST(SelfSend, InAGroupOfOneReportsMismatchesTimeoutsAndAborts) {
  world(1, [](int) {
    auto room = at::empty({4});
    const auto receiving = irecv(room, {.src = 0});
    const auto sending = isend(at::ones({3}), {.dst = 0});
    const auto mismatch = caught([&] { receiving.wait(); });
    EXPECT_EQ(mismatch.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(mismatch, "3 elements") && says(mismatch, "receive of 4")) << mismatch.message;
    EXPECT_EQ(caught([&] { sending.wait(); }).kind, ErrorKind::kUsage);
    const auto late = irecv(room, {.src = 0, .timeout = Milliseconds(5)});
    const auto timeout = caught([&] { late.wait(); });
    EXPECT_EQ(timeout.kind, ErrorKind::kTimeout);
    EXPECT_TRUE(says(timeout, "no send with tag 0")) << timeout.message;
    EXPECT_EQ(caught([&] { recv(room, {.timeout = Milliseconds(5)}); }).kind, ErrorKind::kTimeout);
    const auto early = isend(filled(4, 2), {.dst = 0});
    EXPECT_EQ(recv(room), 0);  // any source: the one that is there
    early.wait();
    expect_equal(room, filled(4, 2));
    const auto pending = irecv(room, {.src = 0});
    default_group()->abort("enough");
    EXPECT_EQ(caught([&] { pending.wait(); }).kind, ErrorKind::kAborted);
  });
}

TEST(PointToPoint, RefusesBadPeersTagsAndTensors) {
  world(2, [](int rank) {
    const int other = 1 - rank;
    auto tensor = at::ones({2});
    const auto usage = [](const std::function<void()>& fn, const std::string& part) {
      const auto error = caught(fn);
      EXPECT_EQ(error.kind, ErrorKind::kUsage) << error.message;
      EXPECT_TRUE(says(error, part) && says(error, "point_to_point_test.cpp:")) << error.message;
    };
    usage([&] { send(tensor, {.dst = 2}); }, "dst is 2, ranks of this group are 0 to 1");
    usage([&] { isend(tensor, {.dst = -1}); }, "dst is -1");
    usage([&] { recv(tensor, {.src = 9}); }, "src is 9");
    usage([&] { irecv(tensor, {.group_src = 2}); }, "group_src is 2");
    usage([&] { send(tensor, {}); }, "neither dst nor group_dst");
    usage([&] { send(tensor, {.dst = other, .group_dst = other}); }, "both given");
    usage([&] { recv(tensor, {.src = other, .group_src = other}); }, "both given");
    usage([&] { send(tensor, {.dst = other, .tag = -1}); }, "tag is -1");
    usage([&] { irecv(tensor, {.src = other, .tag = -3}); }, "tag is -3");
    usage([&] { send(at::Tensor(), {.dst = other}); }, "undefined");
    usage([&] { recv(at::ones({1}).expand({3}), {.src = other}); }, "share memory");
    EXPECT_EQ(caught([&] { isend(tensor, {.dst = other}).get_future(); }).kind, ErrorKind::kUsage);
    irecv(tensor, {.src = other}).wait();
    EXPECT_EQ(caught([&] { barrier().source_rank(); }).kind, ErrorKind::kUsage);
  });
}

// Roots and peers are ranks in the world; group_ ones are ranks in the group, here {1, 3} of four.
TEST(SubGroups, RanksOfTheWorldNameMembersOfASubGroup) {
  world(4, [](int rank) {
    const auto group = new_group({1, 3});
    auto tensor = filled(2, rank);
    if (rank % 2 == 0) {  // not members: a warning, and nothing happens
      EXPECT_EQ(recv(tensor, {.src = 1, .group = group}), std::nullopt);
      send(tensor, {.dst = 3, .group = group});
      EXPECT_TRUE(isend(tensor, {.dst = 3, .group = group}).done());
      EXPECT_TRUE(all_reduce(tensor, {.group = group}).result().empty());
      EXPECT_TRUE(
          batch_isend_irecv({{.op = P2PKind::kIsend, .tensor = tensor, .peer = 1, .group = group}}).empty());
      barrier({.group = group});
      expect_equal(tensor, filled(2, rank));
      return;
    }
    const int other = rank == 1 ? 3 : 1;
    broadcast(tensor, {.src = 3, .group = group});
    expect_equal(tensor, filled(2, 3));
    broadcast(tensor.fill_(rank), {.group_src = 0, .group = group});
    expect_equal(tensor, filled(2, 1));
    auto came = at::empty({2});
    const auto sending = isend(filled(2, rank), {.dst = other, .group = group});
    EXPECT_EQ(recv(came, {.group = group}), other);
    expect_equal(came, filled(2, other));
    sending.wait();
    const auto work = irecv(came, {.group_src = rank == 1 ? 1 : 0, .group = group});
    send(filled(2, -rank), {.dst = other, .group = group});
    work.wait();
    EXPECT_EQ(work.source_rank(), other);
    EXPECT_EQ(get_group_rank(group, work.source_rank()), other / 2) << "the sender in terms of the group";
    expect_equal(came, filled(2, -other));
    const auto outsider = caught([&] { send(came, {.dst = 2, .group = group}); });
    EXPECT_EQ(outsider.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(outsider, "dst is 2") && says(outsider, "1, 3") && says(outsider, "group_dst"))
        << outsider.message;
    EXPECT_TRUE(says(caught([&] { broadcast(came, {.group_src = 3, .group = group}); }), "0 to 1"));
    // gather's default root is rank 0 of the world, which is no member.
    EXPECT_TRUE(says(caught([&] { gather(came, {}, {.group = group}); }), "dst is 0"));
  });
}

TEST(BatchIsendIrecv, ComesThroughWhateverTheOrder) {
  for (const int n : {1, 2, 3, 4, 7}) {
    world(n, [n](int rank) {
      // Everyone exchanges with everyone, itself included; even ranks send first, odd ones receive first.
      std::vector<at::Tensor> came;
      std::vector<P2POp> sends, receives;
      for (int r = 0; r < n; ++r) {
        came.push_back(at::empty({50'000}));
        sends.push_back({.op = P2PKind::kIsend, .tensor = filled(50'000, 10 * rank + r), .peer = r});
        receives.push_back({.op = P2PKind::kIrecv, .tensor = came.back(), .group_peer = r});
      }
      auto& ops = rank % 2 == 0 ? sends : receives;
      auto& rest = rank % 2 == 0 ? receives : sends;
      ops.insert(ops.end(), rest.begin(), rest.end());
      const auto works = batch_isend_irecv(ops);
      EXPECT_EQ(works.size(), static_cast<std::size_t>(2 * n));
      for (const auto& work : works) work.wait();
      for (int r = 0; r < n; ++r)
        expect_equal(came[static_cast<std::size_t>(r)], filled(50'000, 10 * r + rank));
    });
  }
}

TEST(BatchIsendIrecv, IsCheckedAsAWholeBeforeItStarts) {
  world(2, [](int rank) {
    const int other = 1 - rank;
    auto tensor = at::ones({2});
    const auto usage = [](std::vector<P2POp> ops, const std::string& part) {
      const auto error = caught([&] { batch_isend_irecv(std::move(ops)); });
      EXPECT_EQ(error.kind, ErrorKind::kUsage) << error.message;
      EXPECT_TRUE(says(error, part) && says(error, "point_to_point_test.cpp:")) << error.message;
    };
    const P2POp good{.op = P2PKind::kIsend, .tensor = tensor, .peer = other};
    usage({}, "empty");
    usage({good, {.op = P2PKind::kIrecv, .tensor = tensor, .peer = 5}}, "src is 5");
    usage({good, {.op = P2PKind::kIrecv, .tensor = tensor}}, "neither peer nor group_peer");
    usage({good, {.op = static_cast<P2PKind>(7), .tensor = tensor, .peer = other}}, "op 7");
    usage({good, {.op = P2PKind::kIsend, .tensor = at::Tensor(), .peer = other}}, "undefined");
    usage({good, {.op = P2PKind::kIsend, .tensor = tensor, .peer = other, .group = default_group()}},
          "different groups");
    // None of the good ones was started.
    auto came = at::empty({2});
    const auto works = batch_isend_irecv({{.op = P2PKind::kIsend, .tensor = filled(2, 5), .peer = other},
                                          {.op = P2PKind::kIrecv, .tensor = came, .peer = other}});
    for (const auto& work : works) work.wait();
    expect_equal(came, filled(2, 5));
  });
}

TEST(PointToPoint, SizesOrTypesThatDoNotMatchAreAnErrorOnBothSides) {
  const std::pair<at::Tensor, at::Tensor> pairs[] = {{at::ones({100'000}), at::empty({50'000})},
                                                     {at::ones({4}), at::empty({3})},
                                                     {at::ones({4}), at::empty({4}, at::kInt)},
                                                     {at::ones({100'000}), at::empty({100'000}, at::kInt)}};
  for (const auto& [sent, wanted] : pairs) {
    world(2, [&](int rank) {
      const auto error = caught([&] {
        if (rank == 0) send(sent, {.dst = 1});
        if (rank == 1) recv(wanted, {.src = 0});
        barrier();  // a short message was over before anyone looked at it
      });
      EXPECT_EQ(error.kind, ErrorKind::kUsage) << error.message;
      EXPECT_TRUE(says(error, "recv(") && says(error, "send(")) << error.message;
    });
  }
}

TEST(PointToPoint, AReceiveWithoutASenderTimesOut) {
  std::latch timed_out(1);
  world(2, [&](int rank) {
    if (rank == 0) return timed_out.wait();
    auto tensor = at::empty({4});
    const auto error = caught([&] { recv(tensor, {.src = 0, .timeout = Milliseconds(50)}); });
    EXPECT_EQ(error.kind, ErrorKind::kTimeout) << error.message;
    EXPECT_TRUE(says(error, "recv #1")) << error.message;
    timed_out.count_down();
  });
}

}  // namespace
}  // namespace lockstep
