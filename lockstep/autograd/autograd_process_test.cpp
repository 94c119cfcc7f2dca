// Workers that are real processes, one of which is killed by SIGKILL while gradients go through it. Survivors
// get the loss from whatever waited for the dead, keep nothing of it, and train on without it.
// The parent uses no tensor: it forks.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <thread>

#include "lockstep/autograd/autograd.h"
#include "lockstep/rpc/process_testing.h"
#include "lockstep/rpc/remote.h"

namespace lockstep::autograd {
namespace {

using namespace std::chrono_literals;
using rpc::remote;
using rpc::rpc_sync;
using rpc::testing::Board;
using rpc::testing::Children;
using rpc::testing::require;

// Where a worker comes by on the way of a pipeline. Behind kForwardOut and kBackwardIn are the workers after
// it, behind the others those before.
enum class Point { kForwardIn, kForwardOut, kBackwardIn, kBackwardOut };
constexpr std::array kPoints = {Point::kForwardIn, Point::kForwardOut, Point::kBackwardIn,
                                Point::kBackwardOut};

// Who dies, and where. Set before the fork.
struct Fate {
  int victim = -1;
  std::optional<Point> at{};  // the first time it comes by there
  std::uint64_t after = 0;    // else: having come by so many points,
  bool by_its_own_hand =
      true;  // at that very place, or a little later, wherever the parent's signal meets it
};
Fate fate;
Board* board = nullptr;  // its first counters: how many points each worker came by
constexpr int kMeeting = 32;
constexpr int kTransports = 2;

int self() {
  return rpc::current_agent("test")->self().id;
}

void come_by(Point point) {
  const int here = self();
  const auto n = board->counters[here].fetch_add(1) + 1;
  if (here != fate.victim || !fate.by_its_own_hand) return;
  if (fate.at ? *fate.at == point : n == fate.after) ::raise(SIGKILL);
}

at::Tensor& weight() {
  static at::Tensor mine = at::full({1}, self() + 2.0).set_requires_grad(true);
  return mine;
}

at::Tensor marked(const at::Tensor& x, Point point) {
  x.register_hook([point](const at::Tensor& gradient) {
    come_by(point);
    return gradient;
  });
  return x;
}

// x times the weight of this worker, then of those of `path`, the last of which answers through all others.
at::Tensor layers(const at::Tensor& x, const std::vector<int>& path, bool by_rref) {
  come_by(Point::kForwardIn);
  auto y = marked(x * weight(), Point::kBackwardOut);
  if (!path.empty()) {
    const std::vector<int> rest(path.begin() + 1, path.end());
    y = by_rref ? remote(path[0], layers, {y, rest, by_rref}).to_here()
                : rpc_sync(path[0], layers, {y, rest, by_rref});
  }
  come_by(Point::kForwardOut);
  return marked(y * 1, Point::kBackwardIn);
}
LOCKSTEP_RPC_FUNCTION(layers, "autograd_process_test.layers");

double gradient_here() {
  const auto gradient = current_context()->gradients().find(weight());
  return gradient.defined() ? gradient.item<double>() : 0;
}
LOCKSTEP_RPC_FUNCTION(gradient_here, "autograd_process_test.gradient_here");

struct Step {
  std::vector<int> path;
  std::int64_t n_values = 3;
  Mode mode = Mode::kSmart;
  bool by_rref = false;
};

// Forward, backward, and every gradient, which small whole numbers make exact.
void train(const Step& step) {
  const DistAutogradContext context;
  backward(context, {layers(at::ones({step.n_values}), step.path, step.by_rref).sum()}, {.mode = step.mode});
  std::vector<int> all = step.path;
  all.push_back(self());
  auto product = static_cast<double>(step.n_values);
  for (const int worker : all) product *= worker + 2;
  for (const int worker : all) {
    const auto times = static_cast<double>(std::ranges::count(all, worker));
    const double gradient = rpc_sync(worker, gradient_here);
    require(gradient == times * product / (worker + 2),
            base::cat("the gradient of worker ", worker, " is ", gradient));
  }
}

// True when the victim was found to be gone. Nothing else may go wrong.
bool meets_the_loss(const std::function<void()>& fn) {
  try {
    fn();
    return false;
  } catch (const Error& error) {
    const std::string text = error.what();
    require(error.kind() == ErrorKind::kPeerLost, "lost, not " + text);
    require(text.find("worker" + std::to_string(fate.victim)) != std::string::npos, "it is named: " + text);
    return true;
  }
}

void await(const std::string& what, const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::after(Milliseconds(60'000));
  while (!condition()) {
    require(!deadline.expired(), what);
    std::this_thread::sleep_for(200us);
  }
}

// `n` workers have come to meeting `which`.
void meet(int which, std::uint64_t n) {
  auto& counter = board->counters[kMeeting + which];
  ++counter;
  await("all come", [&] { return counter >= n; });
}

at::Tensor value_there() {
  return at::ones({2});
}
LOCKSTEP_RPC_FUNCTION(value_there, "autograd_process_test.value_there");

using Values = std::vector<rpc::RRef<at::Tensor>>;

// A value on every other worker, which has confirmed it.
Values hold_values(int world) {
  Values values;
  for (int worker = 0; worker < world; ++worker) {
    if (worker == self()) continue;
    values.push_back(remote(worker, value_there));
    values.back().to_here();
  }
  return values;
}

bool counts_are_zero(const std::vector<const char*>& names) {
  const auto info = rpc::get_debug_info();
  return std::ranges::all_of(names, [&](const char* name) { return info.at(name) == "0"; });
}

// The second half of a life: the victim is dead, this worker uses no context.
void live_on(int world, Values values) {
  const auto n_left = static_cast<std::uint64_t>(world) - 1;
  await("the loss is known", [&] { return rpc::get_worker_infos().size() == n_left; });
  meet(1, n_left);
  await("no context and no pass is left", [] {
    return counts_are_zero({"num_autograd_contexts", "num_current_backward_passes"});
  });
  // What only the dead referred to has gone; what survivors refer to is there until they let go.
  await("values of the dead are gone",
        [&] { return rpc::get_debug_info().at("num_owner_rrefs") == std::to_string(n_left - 1); });
  meet(2, n_left);
  values.clear();
  await("no RRef is left", [] {
    return counts_are_zero(
        {"num_owner_rrefs", "num_forks", "num_users", "num_pending_users", "num_pending_futures"});
  });
  meet(3, n_left);
  std::vector<int> others;
  for (int i = 1; i < world; ++i) {
    const int worker = (self() + i) % world;
    if (worker != fate.victim) others.push_back(worker);
  }
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) train({.path = others, .mode = mode});
  meet(4, n_left);
  await("no context and no pass is left behind the last pass", [] {
    return counts_are_zero({"num_autograd_contexts", "num_current_backward_passes"});
  });
  rpc::shutdown();
}

// Workers of which one follows its fate. `work` ends when it met the loss.
void run_fate(int world, bool tcp_only, const std::function<void(int rank)>& work) {
  Children workers(world,
                   [&](int rank, Board& shared) {
                     board = &shared;
                     meet(0, static_cast<std::uint64_t>(world));
                     Values values = hold_values(world);
                     meet(5, static_cast<std::uint64_t>(world));
                     work(rank);
                     live_on(world, std::move(values));
                   },
                   {.tcp_only = tcp_only, .change = [](rpc::RpcOptions& options) {
                      options.rpc_timeout = 40'000ms;
                      options.extensions = {extension};
                    }});
  if (!fate.by_its_own_hand) {
    const Deadline deadline = Deadline::after(Milliseconds(60'000));
    while (workers.board().counters[fate.victim] < fate.after && !deadline.expired()) ::usleep(20);
    workers.kill(fate.victim);
  }
  workers.expect_end({fate.victim});
}

std::string describe(bool tcp_only) {
  return base::cat("worker ", fate.victim, fate.at ? " at point " : " after ",
                   fate.at ? static_cast<int>(*fate.at) : static_cast<int>(fate.after),
                   fate.by_its_own_hand ? "" : " by a signal", tcp_only ? ", TCP" : ", shared memory");
}

// Worker 0 calls 1, which calls 2. Whoever dies, wherever: it cannot be over before.
TEST(AutogradProcesses, AreNotifiedOfADeathAtEveryPointOfAPipeline) {
  for (int transport = 0; transport < kTransports; ++transport) {
    for (const int victim : {0, 1, 2}) {
      for (const Point point : kPoints) {
        fate = {.victim = victim, .at = point};
        SCOPED_TRACE(describe(transport == 1));
        run_fate(3, transport == 1, [&](int rank) {
          if (rank != 0) return;
          const Mode mode = (victim + static_cast<int>(point)) % 2 == 0 ? Mode::kSmart : Mode::kFast;
          require(meets_the_loss([&] { train({.path = {1, 2}, .mode = mode}); }), "the loss is raised");
        });
        if (HasFailure()) return;
      }
    }
  }
}

// Everybody calls everybody, by calls and RRefs, in large and small.
TEST(AutogradProcesses, OutliveAnyOneOfThemAtAnyTime) {
  constexpr int kWorld = 4;
  std::mt19937 random(11);
  for (int round = 0; round < 40; ++round) {
    const bool tcp_only = round % 4 >= 2;
    fate = {.victim = static_cast<int>(random() % kWorld),
            .after = 1 + random() % 120,
            .by_its_own_hand = round % 2 == 0};
    const auto seed = static_cast<unsigned>(random());
    SCOPED_TRACE(describe(tcp_only));
    run_fate(kWorld, tcp_only, [&](int rank) {
      std::mt19937 draw(seed + static_cast<unsigned>(rank));
      for (int n_after = 0; n_after < 5;) {
        Step step{.n_values = draw() % 3 == 0 ? 20'000 : 3,
                  .mode = draw() % 2 == 0 ? Mode::kSmart : Mode::kFast,
                  .by_rref = draw() % 2 == 0};
        for (std::size_t n = 1 + draw() % 3; step.path.size() < n;) {
          step.path.push_back(static_cast<int>(draw() % kWorld));
        }
        if (meets_the_loss([&] { train(step); }) || n_after > 0) ++n_after;
      }
    });
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace lockstep::autograd
