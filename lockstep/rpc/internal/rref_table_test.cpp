// The bookkeeping of RRefs alone: each worker is only an RRefTable, and the network reorders and duplicates
// what they send.
#include "lockstep/rpc/internal/rref_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "lockstep/rpc/detail/rref_manager.h"

namespace lockstep::rpc::internal {
namespace {

// Fewer under sanitizers, where each takes ten times as long.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kSchedules = 1000;
#else
constexpr std::uint64_t kSchedules = 2000;
#endif

struct Handle {
  std::uint64_t rref = 0;
  std::uint64_t fork = 0;    // 0 at the owner
  RRefTable::Value value{};  // at the owner
  WorkerId owner = 0;
};

struct Message {
  enum class What { kCreate, kCreated, kCarry, kControl, kAnswer } what = What::kCarry;
  WorkerId from = 0;
  WorkerId to = 0;
  RRefOnWire ref{};                      // kCreate, kCreated, kCarry
  Control control = Control::kFork;      // kControl, kAnswer
  std::vector<ForkEntry> entries{};      // kControl
  std::vector<std::uint64_t> refused{};  // kAnswer
  std::uint64_t number = 0;              // of a control message and its answer
  bool repeated = false;
};

// Workers, their handles, and what is on its way between them.
class Net {
 public:
  Net(int n, std::uint64_t seed) : random_(seed) {
    for (int i = 0; i < n; ++i) {
      const auto self = static_cast<WorkerId>(i);
      tables_.push_back(std::make_unique<RRefTable>(RRefTable::Options{
          .self = self,
          .new_id = [this, self] { return (std::uint64_t{self} << 48) | ++n_ids_; },
          .new_value = [] { return std::make_shared<OwnedValue>(std::weak_ptr<WaitHelper>()); }}));
    }
    handles_.resize(tables_.size());
    gone_.resize(tables_.size());
  }

  void run(int n_steps) {
    for (int i = 0; i < n_steps && !::testing::Test::HasFailure(); ++i) {
      act();
      for (auto n = draw(3); n > 0; --n) deliver();
      check();
    }
  }
  void lose(WorkerId worker) {
    gone_[worker] = true;
    handles_[worker].clear();
    tables_[worker].reset();
    // What it sent and what was sent to it never arrives.
    std::erase_if(network_, [&](const Message& m) { return m.from == worker || m.to == worker; });
    for (std::size_t i = 0; i < tables_.size(); ++i) {
      if (gone_[i]) continue;
      with(static_cast<WorkerId>(i), [&](auto& table, auto& out) { table.lost(worker, out); });
      for (const auto& handle : handles_[i]) {  // their calls fail
        if (handle.owner == worker && handle.fork != 0) created(static_cast<WorkerId>(i), handle.fork);
      }
      auto& creating = creating_[static_cast<WorkerId>(i)];
      for (const auto& [fork, owner] : creating) {
        if (owner == worker) created(static_cast<WorkerId>(i), fork);
      }
    }
    lossy_ = true;
  }
  // Everyone lets go of everything, and all messages arrive.
  void end() {
    int n_left = 200'000;
    do {
      for (std::size_t i = 0; i < handles_.size(); ++i) {
        while (!handles_[i].empty()) drop(static_cast<WorkerId>(i), 0);
      }
      ASSERT_GT(--n_left, 0) << "messages without end";
      deliver();
    } while (!network_.empty() ||
             std::ranges::any_of(handles_, [](const auto& mine) { return !mine.empty(); }));
    for (std::size_t i = 0; i < tables_.size(); ++i) {
      if (gone_[i]) continue;
      EXPECT_TRUE(tables_[i]->idle()) << "worker " << i << " waits for ever";
      EXPECT_EQ(tables_[i]->n_users(), 0u) << "worker " << i << " kept a fork";
      EXPECT_EQ(tables_[i]->n_owned(), 0u) << "worker " << i << " leaks a value";
      EXPECT_EQ(tables_[i]->n_forks(), 0u) << "worker " << i << " leaks a fork";
    }
    for (const auto& [rref, value] : made_) {
      EXPECT_TRUE(value.expired()) << "RRef " << rref << " leaks";
    }
  }
  std::uint64_t draw(std::uint64_t n) { return random_() % n; }

 private:
  template <class Step>
  void with(WorkerId worker, Step&& step) {
    RRefTable::Actions out;
    step(*tables_[worker], out);
    for (auto& send : out.sends) {
      network_.push_back({.what = Message::What::kControl,
                          .from = worker,
                          .to = send.to,
                          .control = send.control,
                          .entries = std::move(send.entries),
                          .number = ++n_controls_});
      unanswered_.insert(n_controls_);
    }
    for (auto& orphan : out.orphaned) orphan->promise.fail({});
  }

  WorkerId any_worker() {
    WorkerId worker = 0;
    do {
      worker = static_cast<WorkerId>(draw(tables_.size()));
    } while (gone_[worker]);
    return worker;
  }

  // What a program might do.
  void act() {
    const auto me = any_worker();
    auto& mine = handles_[me];
    switch (mine.empty() ? draw(2) : draw(7)) {
      case 0: {
        auto value = std::make_shared<OwnedValue>(std::weak_ptr<WaitHelper>());
        const std::uint64_t rref = (std::uint64_t{me} << 48) | ++n_ids_;
        made_[rref] = value;
        mine.push_back({.rref = rref, .value = std::move(value), .owner = me});
        break;
      }
      case 1:
        create(me, any_worker());
        break;
      case 2:
      case 3:
        drop(me, draw(mine.size()));
        break;
      default:
        pass(me, mine[draw(mine.size())], any_worker());
    }
  }
  void create(WorkerId me, WorkerId there) {
    if (there == me) return;
    const std::uint64_t rref = (std::uint64_t{me} << 48) | ++n_ids_;
    const std::uint64_t fork = (std::uint64_t{me} << 48) | ++n_ids_;
    const RRefOnWire ref{.rref = rref, .fork = fork, .owner = there};
    tables_[me]->create_there(ref);
    creating_[me][fork] = there;
    handles_[me].push_back({.rref = rref, .fork = fork, .owner = there});
    network_.push_back({.what = Message::What::kCreate, .from = me, .to = there, .ref = ref});
    if (draw(8) == 0) created(me, fork);  // it gave up waiting
  }
  void created(WorkerId me, std::uint64_t fork) {
    with(me, [&](auto& table, auto& out) { table.creation_over(fork, out); });
  }
  void pass(WorkerId me, const Handle& handle, WorkerId to) {
    RRefOnWire child;
    if (handle.fork == 0) {
      child = tables_[me]->share_owned(handle.rref, handle.value, to);
    } else {
      ASSERT_TRUE(tables_[me]->share_used(handle.fork, to, child));
    }
    if (draw(16) == 0) {  // it could not be sent
      with(me, [&](auto& table, auto& out) { table.unshare(child, out); });
    } else {
      network_.push_back({.what = Message::What::kCarry, .from = me, .to = to, .ref = child});
    }
  }
  void drop(WorkerId me, std::uint64_t which) {
    auto& mine = handles_[me];
    const Handle handle = mine[which];
    mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(which));
    if (handle.fork != 0) with(me, [&](auto& table, auto& out) { table.drop(handle.fork, out); });
  }

  // Any message that is on its way; control messages and their answers perhaps once more later.
  void deliver() {
    if (network_.empty()) return;
    const auto at = draw(network_.size());
    Message message = std::move(network_[at]);
    network_[at] = std::move(network_.back());
    network_.pop_back();
    if (message.what == Message::What::kControl && !message.repeated && draw(4) == 0) {
      Message again = message;
      again.repeated = true;
      network_.push_back(std::move(again));
    }
    take(message);
  }
  void take(const Message& message) {
    const auto me = message.to;
    switch (message.what) {
      case Message::What::kCreate: {
        auto value = tables_[me]->create_here(message.ref, message.from);
        made_[message.ref.rref] = value;
        value->promise.set(nullptr);
        network_.push_back(
            {.what = Message::What::kCreated, .from = me, .to = message.from, .ref = message.ref});
        break;
      }
      case Message::What::kCreated:
        creating_[me].erase(message.ref.fork);
        created(me, message.ref.fork);
        break;
      case Message::What::kCarry: {
        bool fits = false;
        RRefTable::Value value;
        with(me,
             [&](auto& table, auto& out) { value = table.receive(message.ref, message.from, fits, out); });
        ASSERT_TRUE(fits);
        ASSERT_EQ(value != nullptr, message.ref.owner == me);
        handles_[me].push_back({.rref = message.ref.rref,
                                .fork = value ? 0 : message.ref.fork,
                                .value = value,
                                .owner = message.ref.owner});
        break;
      }
      case Message::What::kControl: {
        Message answer{.what = Message::What::kAnswer, .from = me, .to = message.from};
        answer.control = message.control;
        answer.number = message.number;
        with(me, [&](auto& table, auto& out) {
          answer.refused = table.take(message.from, message.control, message.entries, out);
        });
        if (!lossy_ && !message.repeated) {
          EXPECT_TRUE(answer.refused.empty()) << "a value went before its fork came";
        }
        network_.push_back(std::move(answer));
        break;
      }
      case Message::What::kAnswer:
        if (unanswered_.erase(message.number) == 0) break;  // to a message that was repeated
        with(me, [&](auto& table, auto& out) {
          table.answered(message.from, message.control, message.refused, out);
        });
        break;
    }
  }

  // Nobody has a handle on a value that is gone. After a loss that may be: a child whose parent died before
  // it asked.
  void check() {
    if (lossy_) return;
    for (const auto& mine : handles_) {
      for (const auto& handle : mine) {
        const auto made = made_.find(handle.rref);
        if (made == made_.end()) continue;  // its creation has not come
        ASSERT_FALSE(made->second.expired()) << "RRef " << handle.rref << " ended too early";
        if (handle.fork != 0) {
          ASSERT_EQ(tables_[handle.owner]->find(handle.rref), made->second.lock()) << "the owner forgot it";
        }
      }
    }
  }

  std::mt19937_64 random_;
  std::uint64_t n_ids_ = 0;
  std::uint64_t n_controls_ = 0;
  std::vector<std::unique_ptr<RRefTable>> tables_;
  std::vector<std::vector<Handle>> handles_;
  std::vector<bool> gone_;
  bool lossy_ = false;
  std::vector<Message> network_;
  std::set<std::uint64_t> unanswered_;
  std::map<WorkerId, std::map<std::uint64_t, WorkerId>> creating_;
  std::map<std::uint64_t, std::weak_ptr<OwnedValue>> made_;
};

TEST(RRefTable, NeitherLeaksNorDeletesEarlyInAnySchedule) {
  for (std::uint64_t seed = 1; seed <= kSchedules && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Net net(2 + static_cast<int>(seed % 4), seed);
    net.run(120);
    net.end();
  }
}

TEST(RRefTable, NeitherLeaksNorHangsWhenWorkersAreLost) {
  for (std::uint64_t seed = 1; seed <= kSchedules && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Net net(3 + static_cast<int>(seed % 4), seed);
    net.run(60);
    net.lose(0);
    net.run(40);
    if (seed % 4 != 0) net.lose(1);
    net.run(20);
    net.end();
  }
}

RRefTable make_table(WorkerId self) {
  auto counter = std::make_shared<std::uint64_t>(0);
  return RRefTable({.self = self,
                    .new_id = [self, counter] { return (std::uint64_t{self} << 48) | ++*counter; },
                    .new_value = [] { return std::make_shared<OwnedValue>(std::weak_ptr<WaitHelper>()); }});
}

TEST(RRefTable, ForgetsAForkThatWasDeletedBeforeItWasMade) {
  auto owner = make_table(1);
  RRefTable::Actions out;
  const RRefOnWire ref{.rref = 7, .fork = 8, .owner = 1};
  const ForkEntry entry{.rref = 7, .fork = 8};
  owner.take(0, Control::kDelete, {&entry, 1}, out);
  std::weak_ptr<OwnedValue> value = owner.create_here(ref, 0);
  EXPECT_TRUE(value.expired());
  EXPECT_EQ(owner.n_owned(), 0u);
}

TEST(RRefTable, SendsWhatGathersMeanwhileInOneMessage) {
  auto user = make_table(0);
  RRefTable::Actions out;
  for (std::uint64_t fork = 1; fork <= 5; ++fork) {
    bool fits = false;
    const std::uint64_t made = (std::uint64_t{1} << 48) | fork;
    user.receive({.rref = 100 + fork, .fork = made, .owner = 1}, 1, fits, out);
    ASSERT_TRUE(fits);
    RRefTable::Actions step;
    user.drop(made, step);
    EXPECT_EQ(step.sends.size(), fork == 1 ? 1u : 0u);
  }
  user.answered(1, Control::kDelete, {}, out);
  ASSERT_EQ(out.sends.size(), 1u);
  EXPECT_EQ(out.sends[0].entries.size(), 4u);
  EXPECT_FALSE(user.idle());
  user.answered(1, Control::kDelete, {}, out);
  EXPECT_TRUE(user.idle());
}

TEST(RRefTable, RefusesAForkThatItsSenderDidNotMake) {
  auto user = make_table(0);
  RRefTable::Actions out;
  bool fits = true;
  user.receive({.rref = 1, .fork = (std::uint64_t{3} << 48) | 1, .owner = 1}, 2, fits, out);
  EXPECT_FALSE(fits);
  user.receive({.rref = 1, .fork = (std::uint64_t{2} << 48) | 1, .owner = 1}, 2, fits, out);
  EXPECT_TRUE(fits);
  user.receive({.rref = 1, .fork = (std::uint64_t{2} << 48) | 1, .owner = 1}, 2, fits, out);
  EXPECT_FALSE(fits) << "twice";
}

}  // namespace
}  // namespace lockstep::rpc::internal
