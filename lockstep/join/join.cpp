#include "lockstep/join/join.h"

#include <ATen/ops/full.h>

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/collectives.h"

namespace lockstep {
namespace {

// Then a warning is logged that most of the work is done by few ranks.
constexpr int kManyShadowed = 1000;

[[noreturn]] void exhausted(std::string message) {
  throw InputsExhausted({.kind = ErrorKind::kAborted, .message = std::move(message)});
}

}  // namespace

namespace internal {

Work ActiveRanks::count(std::int64_t mine) {
  // counted_ is replaced below, while the engine could still write to it; and an error of the last count is
  // raised here.
  work_.wait();  // of the last iteration, long over
  counted_ = at::full({1}, mine, at::kLong);
  work_ = all_reduce(counted_, {.group = group_, .async_op = true, .where = options_.where});
  return work_;
}

void ActiveRanks::present() {
  // Asynchronous on purpose: a rank with input does not need the number before DDP divides by it
  // (n_active()).
  count(1);
  if (!options_.throw_on_early_termination) return;
  // All ranks see the same sum and raise in the same iteration, so none is left waiting in a collective of
  // the model.
  const int missing = group_->size() - n_active();
  if (missing != 0) {
    exhausted(base::cat("join: ", missing, " of ", group_->size(),
                        " ranks have no input left, and throw_on_early_termination is set"));
  }
}

int ActiveRanks::absent() {
  count(0);
  return n_active();
}

int ActiveRanks::n_active() {
  work_.wait();
  return static_cast<int>(*counted_.const_data_ptr<std::int64_t>());
}

}  // namespace internal

void Joinable::enter_join(const JoinOptions&) {}
void Joinable::finish_join(bool) {}
void Joinable::leave_join() noexcept {}

void Joinable::begin_iteration() {
  // Once per iteration, by the first joinable only: the shadowing ranks answer one count with one
  // shadow_iteration() of each.
  if (count_ && is_first_) count_->present();
}

// The joinables while they are being joined.
class Joining {
 public:
  Joining(const std::vector<JoinTarget>& joinables, const std::shared_ptr<internal::ActiveRanks>& count)
      : joinables_(joinables) {
    for (Joinable& joinable : joinables_) {
      // A constructor that throws runs no destructor, so what was entered is left here.
      if (joinable.count_) {
        leave();
        base::raise(ErrorKind::kUsage,
                    "join: one of the joinables is given twice, or is being joined already");
      }
      joinable.count_ = count;
      ++n_entered_;
    }
    joinables_.front().get().is_first_ = true;
  }
  ~Joining() { leave(); }
  Joining(const Joining&) = delete;
  Joining& operator=(const Joining&) = delete;

 private:
  // In reverse order. count_ goes first, so that leave_join() cannot begin an iteration.
  void leave() noexcept {
    for (; n_entered_ != 0; --n_entered_) {
      joinables_[n_entered_ - 1].get().count_ = nullptr;
      joinables_[n_entered_ - 1].get().is_first_ = false;
      joinables_[n_entered_ - 1].get().leave_join();
    }
  }

  const std::vector<JoinTarget>& joinables_;
  std::size_t n_entered_ = 0;
};

void join(const std::vector<JoinTarget>& joinables, const std::function<void()>& body, JoinOptions options) {
  if (joinables.empty()) base::raise(ErrorKind::kUsage, "join: there is nothing to join");
  const Group& group = joinables.front().get().join_group();
  for (const Joinable& joinable : joinables) {
    if (joinable.join_group() != group)
      base::raise(ErrorKind::kUsage,
                  base::cat("join: the joinables belong to different groups, \"", group->name(), "\" and \"",
                            joinable.join_group()->name(), "\""));
  }
  // Before any collective, and after the checks: wrong arguments are reported either way.
  if (!options.enable) return body();

  const auto count = std::make_shared<internal::ActiveRanks>(group, options);
  // Its destructor runs whatever body() throws. A rank that throws leaves without finish_join(); the others
  // then wait in a collective until it times out or the rank is lost.
  const Joining joining(joinables, count);
  for (Joinable& joinable : joinables) joinable.enter_join(options);
  body();

  // True only where the first count already found no rank with input: this rank was among the last.
  bool is_last_joiner = true;
  for (int n_shadowed = 0; count->absent() != 0; ++n_shadowed) {
    if (options.throw_on_early_termination) {
      exhausted(base::cat("join: rank ", group->rank(),
                          " has no input left while others have, and throw_on_early_termination is set"));
    }
    if (n_shadowed == kManyShadowed) {
      base::log(LogLevel::kWarn,
                base::cat("join: rank ", group->rank(), " has participated with zeros for ", kManyShadowed,
                          " iterations; its share of the input is much smaller than theirs. Logged once."));
    }
    is_last_joiner = false;
    for (Joinable& joinable : joinables) {
      // The same joinables in the same order as the iteration of the others, or the collectives would not
      // match.
      if (!joinable.shadow_iteration()) break;
    }
  }
  for (Joinable& joinable : joinables) joinable.finish_join(is_last_joiner);
}

}  // namespace lockstep
