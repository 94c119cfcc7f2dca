// Plans alone, without the engine: every rank's plan is executed over plain arrays, one step at a time, in
// random interleavings. A step that reads what another rank has not laid out yet, or overwrites what another
// still needs, shows as a wrong result.
#include "lockstep/host/plan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace lockstep::comm {
namespace {

using Element = std::uint64_t;

// One rank's memory.
struct Machine {
  std::vector<Element> send, recv;
  std::vector<Element> stage_in[2], stage_out[2];
  std::vector<Step> plan;
  std::size_t next = 0;
  std::uint32_t phase = 0;
};

class Simulation {
 public:
  Simulation(lockstep_op_kind kind, int size, std::uint64_t count, std::size_t stage_bytes)
      : kind_(kind), root_(size - 1), count_(count), machines_(size) {
    for (int r = 0; r < size; ++r) {
      Machine& m = machines_[r];
      const bool to_each = kind == LOCKSTEP_REDUCE_SCATTER || kind == LOCKSTEP_ALL_TO_ALL ||
                           (kind == LOCKSTEP_SCATTER && r == root_);
      const bool from_each = kind == LOCKSTEP_ALL_GATHER || kind == LOCKSTEP_ALL_TO_ALL ||
                             (kind == LOCKSTEP_GATHER && r == root_);
      const auto n = static_cast<std::uint64_t>(size);
      m.send.resize(to_each ? count * n : count);
      m.recv.assign(from_each ? count * n : count, kUntouched);
      std::vector<std::uint64_t> sends, receives;
      if (kind == LOCKSTEP_ALL_TO_ALL_V || kind == LOCKSTEP_ALL_GATHER_V) {
        for (int q = 0; q < size; ++q) {
          sends.push_back(uneven(r, q) * sizeof(Element));
          receives.push_back(uneven(q, r) * sizeof(Element));
        }
        m.send.resize(before(size, [&](int q) { return uneven(r, q); }));
        m.recv.assign(before(size, [&](int q) { return uneven(q, r); }), kUntouched);
      }
      for (std::size_t i = 0; i < m.send.size(); ++i) m.send[i] = (i + 1) * 100 + static_cast<Element>(r);
      for (int p : {0, 1}) {
        m.stage_in[p].assign(stage_bytes / sizeof(Element), 777);
        m.stage_out[p].assign(stage_bytes / sizeof(Element), 888);
      }
      m.plan = make_plan({.kind = kind,
                          .rank = r,
                          .size = size,
                          .root = root_,
                          .n_bytes = count * sizeof(Element),
                          .stage_in_bytes = stage_bytes,
                          .stage_out_bytes = stage_bytes,
                          .send_bytes = sends,
                          .recv_bytes = receives});
    }
  }

  // Runs all plans to their ends; false when nobody can go on.
  bool run(std::mt19937& random) {
    for (;;) {
      std::vector<int> able;
      bool over = true;
      for (int r = 0; r < static_cast<int>(machines_.size()); ++r) {
        if (machines_[r].next == machines_[r].plan.size()) continue;
        over = false;
        if (can_step(r)) able.push_back(r);
      }
      if (over) return true;
      if (able.empty()) return false;
      // Let one rank run ahead at times: that is where reuse of the staging areas breaks.
      const int r = able[random() % able.size()];
      for (std::uint32_t burst = random() % 4 == 0 ? 50 : 1; burst > 0; --burst) {
        if (machines_[r].next < machines_[r].plan.size() && can_step(r)) step(r);
      }
    }
  }

  void expect_result() const {
    const auto size = machines_.size();
    for (std::size_t r = 0; r < size; ++r) {
      const Machine& m = machines_[r];
      for (std::size_t i = 0; i < m.recv.size(); ++i)
        ASSERT_EQ(m.recv[i], expected(r, i)) << "rank " << r << " element " << i;
    }
  }

 private:
  static constexpr Element kUntouched = 999;

  // Elements rank `from` sends to rank `to` in the kinds with counts of their own; some are none.
  std::uint64_t uneven(int from, int to) const {
    if (kind_ == LOCKSTEP_ALL_GATHER_V) return static_cast<std::uint64_t>(from % 3) * count_;
    return static_cast<std::uint64_t>((from * 5 + to * 3) % 4) * count_;
  }
  template <class Length>
  static std::uint64_t before(int end, Length length) {
    std::uint64_t sum = 0;
    for (int q = 0; q < end; ++q) sum += length(q);
    return sum;
  }

  // Element i of what rank r gets in a kind with counts of its own.
  Element expected_uneven(int r, std::uint64_t i) const {
    int from = 0;
    while (i >= uneven(from, r)) i -= uneven(from++, r);
    const bool shared = kind_ == LOCKSTEP_ALL_GATHER_V;
    const std::uint64_t at = shared ? 0 : before(r, [&](int q) { return uneven(from, q); });
    return machines_[from].send[at + i];
  }

  Element expected(std::size_t r, std::size_t i) const {
    const bool at_root = r == static_cast<std::size_t>(root_);
    Element sum = 0;
    switch (kind_) {
      case LOCKSTEP_REDUCE:
        if (!at_root) return kUntouched;
        [[fallthrough]];
      case LOCKSTEP_ALL_REDUCE:
        for (const Machine& m : machines_) sum += m.send[i];
        return sum;
      case LOCKSTEP_REDUCE_SCATTER:
        for (const Machine& m : machines_) sum += m.send[r * count_ + i];
        return sum;
      case LOCKSTEP_GATHER:
        if (!at_root) return kUntouched;
        [[fallthrough]];
      case LOCKSTEP_ALL_GATHER:
        return machines_[i / count_].send[i % count_];
      case LOCKSTEP_SCATTER:
        return machines_[root_].send[r * count_ + i];
      case LOCKSTEP_ALL_TO_ALL:
        return machines_[i / count_].send[r * count_ + i % count_];
      case LOCKSTEP_BROADCAST:
        return machines_[root_].send[i];
      default:
        return expected_uneven(static_cast<int>(r), i);
    }
  }

  bool can_step(int r) const {
    const Step& s = machines_[r].plan[machines_[r].next];
    if (s.kind != StepKind::kWait) return true;
    for (int q = 0; q < static_cast<int>(machines_.size()); ++q) {
      if (q != r && (s.peer == kAllOthers || s.peer == q) && machines_[q].phase < s.phase) return false;
    }
    return true;
  }

  void step(int r) {
    Machine& m = machines_[r];
    const Step& s = m.plan[m.next++];
    const auto at = [](std::uint64_t bytes) { return bytes / sizeof(Element); };
    const std::size_t n = at(s.n_bytes);
    for (std::size_t i = 0; i < n; ++i) {
      switch (s.kind) {
        case StepKind::kCopyIn:
          m.stage_in[s.parity].at(at(s.stage_at) + i) = m.send.at(at(s.user_at) + i);
          break;
        case StepKind::kKeep:
          m.recv.at(at(s.recv_at) + i) = m.send.at(at(s.user_at) + i);
          break;
        case StepKind::kCopyOut: {
          Machine& from = machines_[s.peer];
          m.recv.at(at(s.recv_at) + i) =
              (s.from_in ? from.stage_in : from.stage_out)[s.parity].at(at(s.stage_at) + i);
          break;
        }
        case StepKind::kReduce: {
          Element sum = 0;
          for (int q = 0; q < static_cast<int>(machines_.size()); ++q) {
            sum += q == r ? m.send.at(at(s.user_at) + i)
                          : machines_[q].stage_in[s.parity].at(at(s.stage_at) + i);
          }
          if (s.keep) m.recv.at(at(s.recv_at) + i) = sum;
          if (s.publish) m.stage_out[s.parity].at(i) = sum;
          break;
        }
        default:
          break;
      }
    }
    if (s.kind == StepKind::kSignal) m.phase = s.phase;
  }

  const lockstep_op_kind kind_;
  const int root_;
  const std::uint64_t count_;
  std::vector<Machine> machines_;
};

class Plan : public ::testing::TestWithParam<lockstep_op_kind> {};

TEST_P(Plan, GivesTheRightResultInEveryInterleaving) {
  std::mt19937 random(11);
  for (const int size : {2, 3, 4, 7, 8}) {
    // From less than a cache line to many blocks of a staging area of 4 KiB.
    for (const std::uint64_t count : {1u, 7u, 64u, 513u, 2000u, 5001u}) {
      for (int schedule = 0; schedule < 5; ++schedule) {
        Simulation simulation(GetParam(), size, count, 4096);
        ASSERT_TRUE(simulation.run(random)) << "deadlock with " << size << " ranks, " << count << " elements";
        simulation.expect_result();
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Plan, OfNothingMovesNothing) {
  const std::vector<std::uint64_t> none(2);
  for (const Step& step : make_plan({.kind = GetParam(),
                          .rank = 0,
                          .size = 2,
                          .root = 0,
                          .n_bytes = 0,
                          .stage_in_bytes = 4096,
                          .stage_out_bytes = 4096,
                          .send_bytes = none,
                          .recv_bytes = none})) {
    EXPECT_EQ(step.kind, StepKind::kSignal);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Plan,
                         ::testing::Values(LOCKSTEP_ALL_REDUCE, LOCKSTEP_REDUCE_SCATTER, LOCKSTEP_ALL_GATHER,
                                           LOCKSTEP_BROADCAST, LOCKSTEP_REDUCE, LOCKSTEP_GATHER,
                                           LOCKSTEP_SCATTER, LOCKSTEP_ALL_TO_ALL, LOCKSTEP_ALL_TO_ALL_V,
                                           LOCKSTEP_ALL_GATHER_V));

}  // namespace
}  // namespace lockstep::comm
