// RRefs between workers as threads: values made elsewhere, methods, passing on, ends, errors, losses.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <stdexcept>
#include <thread>

#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::caught;
using testing::expect_no_rrefs;
using testing::run_workers;
using testing::says;
using testing::until;
using testing::Workers;

std::atomic<int> n_alive{0};

struct Counter {
  explicit Counter(int start) : value_(start) {
    if (start < 0) throw std::runtime_error("a counter starts at zero or more");
    ++n_alive;
  }
  Counter(const Counter&) = delete;
  virtual ~Counter() { --n_alive; }

  int add(int n) { return value_ += n; }
  int value() const { return value_; }
  void reset() { value_ = 0; }
  std::string where() const { return current_agent("where")->self().name; }
  Future<int> add_later(int n) {
    Promise<int> promise;
    current_agent("add_later")->run([this, n, promise] { promise.set(value_ += n); });
    return promise.future();
  }

  std::atomic<int> value_;
};
LOCKSTEP_RPC_CLASS(Counter, int);
LOCKSTEP_RPC_METHOD(&Counter::add);
LOCKSTEP_RPC_METHOD(&Counter::value);
LOCKSTEP_RPC_METHOD(&Counter::reset);
LOCKSTEP_RPC_METHOD(&Counter::where, "counter.where");
LOCKSTEP_RPC_METHOD(&Counter::add_later);

struct BigCounter final : Counter {
  BigCounter(int start, const std::string& unused) : Counter(start * 1000) { (void)unused; }
};
LOCKSTEP_RPC_CLASS(BigCounter, int, std::string);
LOCKSTEP_RPC_METHOD(static_cast<int (BigCounter::*)(int)>(&Counter::add), "BigCounter.add");

int add(int a, int b) {
  return a + b;
}
LOCKSTEP_RPC_FUNCTION(add);
int add_slowly(int a, int b) {
  std::this_thread::sleep_for(300ms);
  return a + b;
}
LOCKSTEP_RPC_FUNCTION(add_slowly);
int fail(const std::string& text) {
  throw std::runtime_error(text);
}
LOCKSTEP_RPC_FUNCTION(fail);
void nothing() {}
LOCKSTEP_RPC_FUNCTION(nothing);

int sum_of(const std::vector<RRef<int>>& values) {
  int sum = 0;
  for (const auto& value : values) sum += value.to_here();
  return sum;
}
LOCKSTEP_RPC_FUNCTION(sum_of);
int value_of(const RRef<int>& value) {
  return value.to_here();
}
LOCKSTEP_RPC_FUNCTION(value_of);
int local_value_of(const RRef<int>& value) {
  return value.local_value();
}
LOCKSTEP_RPC_FUNCTION(local_value_of);
RRef<int> own(int value) {
  return RRef<int>(value);
}
LOCKSTEP_RPC_FUNCTION(own);
RRef<int> back(const RRef<int>& value) {
  return value;
}
LOCKSTEP_RPC_FUNCTION(back);

// Kept by a worker, for tests of what its end, or another's, does.
struct Shelf {
  std::mutex mutex;
  std::map<std::string, RRef<Counter>> counters;
};
Shelf shelves[8];
Shelf& my_shelf() {
  return shelves[current_agent("shelf")->self().id];
}
void keep(const RRef<Counter>& counter) {
  const std::lock_guard lock(my_shelf().mutex);
  my_shelf().counters["one"] = counter;
}
LOCKSTEP_RPC_FUNCTION(keep);
RRef<Counter> take_kept() {
  const std::lock_guard lock(my_shelf().mutex);
  return std::exchange(my_shelf().counters["one"], {});
}
LOCKSTEP_RPC_FUNCTION(take_kept);
int bump_kept() {
  RRef<Counter> counter;
  {
    const std::lock_guard lock(my_shelf().mutex);
    counter = my_shelf().counters["one"];
  }
  return counter.rpc_sync(&Counter::add, {1});
}
LOCKSTEP_RPC_FUNCTION(bump_kept);
void pass_kept(int to) {
  rpc_sync(to, keep, {take_kept()});
}
LOCKSTEP_RPC_FUNCTION(pass_kept);
void drop_kept() {
  take_kept();
}
LOCKSTEP_RPC_FUNCTION(drop_kept);

struct Bundle {
  RRef<int> first;
  std::map<std::string, RRef<std::string>> named;
};
auto lockstep_fields(SelfOf<Bundle> auto& self) {
  return std::tie(self.first, self.named);
}
std::string read_bundle(const Bundle& bundle) {
  return std::to_string(bundle.first.to_here()) + bundle.named.at("text").to_here();
}
LOCKSTEP_RPC_FUNCTION(read_bundle);

TEST(RRef, HoldsWhatAFunctionReturnedElsewhere) {
  run_workers(
      3,
      [](int rank, Workers&) {
        const int next = (rank + 1) % 3;
        const auto sum = remote(next, add, {rank, 40});
        EXPECT_EQ(sum.owner(), (WorkerInfo{static_cast<WorkerId>(next), "worker" + std::to_string(next)}));
        EXPECT_FALSE(sum.is_owner());
        EXPECT_EQ(sum.to_here(), rank + 40);
        EXPECT_EQ(sum.to_here(5s), rank + 40) << "as often as one likes";
        sum.get_future().wait();
        EXPECT_TRUE(sum.confirmed_by_owner());
        EXPECT_EQ(sum.type_name(), "int");
        EXPECT_TRUE(says(caught([&] { sum.local_value(); }), "works at the owner only"));
        EXPECT_EQ(sum.local_value_if_ready(), nullptr);
        remote(next, nothing).to_here();
        EXPECT_EQ(remote(next, function<int(int, int)>("add"), {1, 2}).to_here(), 3);
      },
      {}, expect_no_rrefs);
}

TEST(RRef, MayBeOfThisWorker) {
  run_workers(
      2,
      [](int rank, Workers&) {
        const RRef<int> local(rank + 7);
        EXPECT_TRUE(local.is_owner());
        EXPECT_TRUE(local.confirmed_by_owner());
        EXPECT_EQ(local.local_value(), rank + 7);
        EXPECT_EQ(local.to_here(), rank + 7);
        local.local_value() = 1;
        EXPECT_EQ(*local.local_value_if_ready(), 1);
        EXPECT_EQ(local.type_name(), "int");
        const auto here = remote(rank, add_slowly, {rank, 5});
        EXPECT_TRUE(here.is_owner());
        EXPECT_EQ(here.local_value_if_ready(), nullptr);
        EXPECT_EQ(here.local_value(), rank + 5) << "waits until it is made";
        EXPECT_EQ(rpc_sync(1 - rank, value_of, {here}), rank + 5);
        const auto counter = RRef<Counter>::of(3);
        EXPECT_EQ(counter.rpc_sync(&Counter::add, {4}), 7) << "a method, by a call to itself";
        EXPECT_EQ(rpc_sync(rank, local_value_of, {local}), 1) << "sent to itself";
      },
      {}, expect_no_rrefs);
}

TEST(RRef, RunsMethodsWhereTheObjectIs) {
  run_workers(
      2,
      [](int rank, Workers&) {
        if (rank != 0) return;
        const auto counter = remote<Counter>(1, Args{10});
        EXPECT_EQ(counter.rpc_sync(&Counter::add, {5}), 15);
        EXPECT_EQ(counter.rpc_sync(&Counter::value), 15);
        EXPECT_EQ(counter.rpc_sync(&Counter::where), "worker1");
        EXPECT_EQ(counter.rpc_async(&Counter::add_later, {2}).wait(), 17);
        EXPECT_EQ(counter.remote(&Counter::add, {3}).to_here(), 20);
        counter.rpc_sync(&Counter::reset);
        EXPECT_EQ(counter.rpc_sync(&Counter::value), 0);
        EXPECT_NE(counter.type_name().find("Counter"), std::string::npos);
        const auto big = remote<BigCounter>(1, Args{2, "text"});
        EXPECT_EQ(big.rpc_sync(&Counter::add, {1}), 2001) << "a method of the base";
        EXPECT_EQ(remote<Counter>(1, Args<int>{4}, {.timeout = 5s}).rpc_sync(&Counter::value), 4);
      },
      {},
      [](Workers& workers) {
        expect_no_rrefs(workers);
        EXPECT_EQ(n_alive, 0);
      });
}

TEST(RRef, UsedBeforeItIsMadeWaitsForThat) {
  run_workers(
      2,
      [](int rank, Workers&) {
        if (rank != 0) return;
        const auto slow = remote(1, add_slowly, {1, 2});
        EXPECT_FALSE(slow.get_future().done());
        EXPECT_EQ(slow.to_here(), 3);
        const auto failure = caught([] { remote(1, add_slowly, {1, 2}).to_here(20ms); });
        EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
        EXPECT_TRUE(says(failure, "20 milliseconds")) << failure.message;
      },
      {}, expect_no_rrefs);
}

TEST(RRef, RaisesWhatItsCreationFailedWithAtTheNextUse) {
  run_workers(
      3,
      [](int rank, Workers&) {
        if (rank != 0) return;
        const auto failed = remote(1, fail, {"no such file"});
        EXPECT_TRUE(says(caught([&] { failed.to_here(); }), "std::runtime_error: no such file"));
        EXPECT_TRUE(says(caught([&] { failed.get_future().wait(); }), "On WorkerInfo(id=1, name=worker1)"));
        EXPECT_TRUE(says(caught([&] { rpc_sync(2, value_of, {failed}); }), "no such file"));
        const auto object = remote<Counter>(1, Args{-1});
        EXPECT_TRUE(says(caught([&] { object.rpc_sync(&Counter::value); }),
                         "std::runtime_error: a counter starts at zero"));
        const auto wrong = remote<Counter>(1, Args{"text"});
        EXPECT_TRUE(says(caught([&] { wrong.rpc_sync(&Counter::value); }), "expected i32, got text"));
        const auto late = remote(1, add_slowly, {1, 2}, {.timeout = 20ms});
        EXPECT_EQ(caught([&] { late.get_future().wait(); }).kind, ErrorKind::kTimeout);
        EXPECT_EQ(caught([&] { late.to_here(); }).kind, ErrorKind::kTimeout);
        EXPECT_TRUE(says(caught([] { remote(9, add, {1, 2}); }), "no worker with number 9"));
        EXPECT_TRUE(says(caught([] { remote(1, function<int()>("unknown"), {}).to_here(); }), "no function"));
      },
      {}, expect_no_rrefs);
}

TEST(RRef, TravelsInArgumentsResultsAndStructs) {
  run_workers(
      4,
      [](int rank, Workers&) {
        const int a = (rank + 1) % 4;
        const int b = (rank + 2) % 4;
        const auto one = remote(a, add, {rank, 1});
        const RRef<int> two(rank);
        EXPECT_EQ(rpc_sync(b, sum_of, {{one, two, one}}), 3 * rank + 2);
        EXPECT_EQ(rpc_sync(a, local_value_of, {one}), rank + 1) << "to its owner";
        const auto returned = rpc_sync(a, own, {rank + 3});
        EXPECT_EQ(returned.owner().id, a);
        EXPECT_TRUE(returned.confirmed_by_owner());
        EXPECT_EQ(returned.to_here(), rank + 3);
        const auto home = rpc_sync(b, back, {two});
        EXPECT_TRUE(home.is_owner());
        EXPECT_EQ(&home.local_value(), &two.local_value()) << "one value, whatever way a handle went";
        EXPECT_EQ(home, two);
        const auto there = rpc_sync(b, back, {one});
        EXPECT_EQ(there.id(), one.id());
        until([&] { return there.confirmed_by_owner(); });
        EXPECT_TRUE(says(caught([&] { there.get_future(); }), "was passed on"));
        const auto nested = remote(b, own, {rank});
        EXPECT_EQ(nested.to_here().to_here(), rank) << "an RRef of an RRef";
        Bundle bundle{.first = one, .named = {}};
        bundle.named.emplace("text", RRef<std::string>("!"));
        EXPECT_EQ(rpc_sync(b, read_bundle, {bundle}), std::to_string(rank + 1) + "!");
      },
      {}, expect_no_rrefs);
}

TEST(RRef, OfAnotherTypeIsRefusedAndNotLeaked) {
  run_workers(
      3,
      [](int rank, Workers&) {
        if (rank != 0) return;
        const auto number = remote(1, add, {1, 2});
        const auto failure =
            caught([&] { rpc_sync(2, function<int(RRef<int>)>("app.keep_text"), {number}); });
        EXPECT_TRUE(says(failure, "no function")) << failure.message;
        const auto mismatch = caught([&] { rpc_sync(2, function<void(RRef<int>)>("keep"), {number}); });
        EXPECT_TRUE(says(mismatch, "got one of int")) << mismatch.message;
      },
      {}, expect_no_rrefs);
}

TEST(RRef, CannotBeEncodedOutsideACall) {
  run_workers(1, [](int, Workers&) {
    const RRef<int> local(3);
    EXPECT_TRUE(says(caught([&] { encode(local); }), "argument or a result of an RPC"));
    EXPECT_TRUE(says(caught([&] { Object any(local); }), "argument or a result of an RPC"));
    EXPECT_TRUE(
        says(caught([&] { encode(std::vector<RRef<int>>{local}); }), "argument or a result of an RPC"));
  });
}

TEST(RRef, KeepsItsValueAsLongAsAnyWorkerHasAHandle) {
  n_alive = 0;
  run_workers(
      4,
      [](int rank, Workers&) {
        if (rank != 0) return;
        {
          const auto counter = remote<Counter>(1, Args{10});
          rpc_sync(2, keep, {counter});
        }
        EXPECT_EQ(rpc_sync(2, bump_kept), 11);
        rpc_sync(2, pass_kept, {3});
        EXPECT_EQ(rpc_sync(3, bump_kept), 12);
        rpc_sync(3, pass_kept, {1});
        EXPECT_EQ(rpc_sync(1, bump_kept), 13) << "its owner has the only handle";
        rpc_sync(1, pass_kept, {2});
        EXPECT_EQ(rpc_sync(2, bump_kept), 14);
        EXPECT_EQ(n_alive, 1);
        rpc_sync(2, drop_kept);
        until([] { return n_alive == 0; });
      },
      {}, expect_no_rrefs);
}

TEST(RRef, InAnAnswerThatComesTooLateIsNotLeaked) {
  n_alive = 0;
  run_workers(
      2,
      [](int rank, Workers&) {
        if (rank != 0) return;
        rpc_sync(1, keep, {RRef<Counter>::of(1)});
        EXPECT_EQ(n_alive, 1);
        EXPECT_EQ(caught([] {
                    rpc_sync(1, function<RRef<Counter>()>("take_kept_slowly"), {}, {.timeout = 20ms});
                  }).kind,
                  ErrorKind::kTimeout);
        until([] { return n_alive == 0; });
      },
      {}, expect_no_rrefs);
}
RRef<Counter> take_kept_slowly() {
  std::this_thread::sleep_for(200ms);
  return take_kept();
}
LOCKSTEP_RPC_FUNCTION(take_kept_slowly);

TEST(RRef, OfAnOwnerThatIsLostRaisesPeerLost) {
  n_alive = 0;
  run_workers(3, [](int rank, Workers& workers) {
    if (rank != 0) return;
    const auto counter = remote<Counter>(1, Args{10});
    const auto number = remote(1, add, {1, 2});
    EXPECT_EQ(number.to_here(), 3);
    rpc_sync(2, keep, {counter});
    const auto slow = remote(1, add_slowly, {1, 2});
    const auto waiting = slow.to_here_async();
    EXPECT_EQ(number.type_name(), "int");
    workers.exchange->kill(1, "killed by SIGKILL (9)");
    EXPECT_EQ(number.type_name(), "int") << "it was asked for before";
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { waiting.wait(); }, [&] { number.to_here(); }, [&] { counter.rpc_sync(&Counter::value); },
             [&] { rpc_sync(2, bump_kept); }, [&] { slow.to_here(); }}) {
      const auto failure = caught(use);
      EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
      EXPECT_TRUE(says(failure, "worker1")) << failure.message;
    }
    rpc_sync(2, drop_kept);
    for (const int alive : {0, 2}) {
      auto& manager = rref_manager(*workers.agents[static_cast<std::size_t>(alive)]);
      EXPECT_TRUE(manager.wait_idle(Deadline::after(10s)));
    }
  });
}

TEST(RRef, OfAUserThatIsLostIsReleased) {
  n_alive = 0;
  run_workers(3, [](int rank, Workers& workers) {
    if (rank != 0) return;
    {
      const auto counter = RRef<Counter>::of(1);
      const auto other = remote<Counter>(1, Args{2});
      rpc_sync(2, keep, {counter});
      rpc_sync(2, keep, {other});
      rpc_sync(2, keep, {counter});
    }
    until([] { return n_alive == 1; });  // worker2 has let go of the other
    workers.exchange->kill(2, "killed");
    until([] { return n_alive == 0; });
    for (const int alive : {0, 1}) {
      auto& manager = rref_manager(*workers.agents[static_cast<std::size_t>(alive)]);
      EXPECT_TRUE(manager.wait_idle(Deadline::after(10s)));
      EXPECT_EQ(manager.leaks(), "");
    }
  });
  shelves[2].counters.clear();
}

TEST(RRef, ThatOutlivesItsAgentIsHarmless) {
  RRef<Counter> user;
  RRef<Counter> owner;
  n_alive = 0;
  run_workers(2, [&](int rank, Workers&) {
    if (rank != 0) return;
    user = remote<Counter>(1, Args{10});
    user.get_future().wait();
    owner = RRef<Counter>::of(4);
  });
  EXPECT_EQ(owner.local_value().value(), 4);
  EXPECT_EQ(caught([&] { user.rpc_sync(&Counter::value); }).kind, ErrorKind::kUsage);
  user = {};
  owner = {};
  EXPECT_EQ(n_alive, 0);
}

TEST(RRef, LeftAtTheEndIsReported) {
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    const auto user = remote<Counter>(1, Args{10});
    user.get_future().wait();
    const auto& manager = rref_manager(*workers.agents[1]);
    EXPECT_EQ(workers.agents[1]->debug_info().at("num_owner_rrefs"), "1");
    EXPECT_EQ(workers.agents[1]->debug_info().at("num_forks"), "1");
    const auto failure = caught([&] { manager.check_leaks(RRefManager::LeakCheck::kStrict); });
    EXPECT_TRUE(says(failure, "still refer to 1 values of worker1")) << failure.message;
    EXPECT_TRUE(says(failure, "Counter), held by worker 0")) << failure.message;
    manager.check_leaks(RRefManager::LeakCheck::kWarn);
    rref_manager(*workers.agents[0]).drop_users();
    EXPECT_TRUE(rref_manager(*workers.agents[0]).wait_idle(Deadline::after(10s)));
    manager.check_leaks(RRefManager::LeakCheck::kStrict);
    EXPECT_TRUE(says(caught([&] { rpc_sync(1, keep, {user}); }), "released by shutdown"));
  });
}

}  // namespace
}  // namespace lockstep::rpc
