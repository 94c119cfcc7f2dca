// Training on uneven inputs: ranks that exhaust their input keep participating with zero contributions.
//
//   lockstep::join({*model, optimizer}, [&] {
//     for (const auto& batch : my_batches) {        // as many as this rank has
//       loss_fn(model->forward(batch.data), batch.target).backward();
//       optimizer.step();
//     }
//   });                                         // returns when the last rank is done; models are equal again
//
// Every collective of an iteration needs all ranks. A rank whose body has returned has joined: in each
// iteration of the others it runs the joinables' shadow_iteration(), which participates in the same
// collectives with zero contributions. An iteration begins when the first joinable of the list calls
// begin_iteration(); ranks are counted there. When no rank has input left, every joinable's finish_join()
// runs on all ranks. The state of an ordinary optimizer is not synchronised: on ranks that exhausted their
// input early it is older.
//
// A function rather than a guard, because its final phase blocks and may raise.
// Thread safety: one thread per joinable. All ranks call join with the same joinables in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <source_location>
#include <type_traits>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace lockstep {

struct JoinOptions {
  bool enable = true;  // false: the body is run, nothing else
  // No rank is shadowed: once a rank has exhausted its input, it and all others raise InputsExhausted, the
  // others in the iteration they are about to begin.
  bool throw_on_early_termination = false;
  // What DistributedDataParallel divides sums of gradients by: all ranks, or those that still have input.
  bool divide_by_initial_world_size = true;
  std::source_location where = std::source_location::current();
};

// A rank has no input left, and throw_on_early_termination is set. kind() is kAborted.
class InputsExhausted : public Error {
 public:
  using Error::Error;
};

namespace internal {

// Counts, once per iteration, the ranks that still have input.
class ActiveRanks {
 public:
  ActiveRanks(Group group, JoinOptions options) : group_(std::move(group)), options_(options) {}
  const JoinOptions& options() const { return options_; }
  // For a rank with input: participates, and does not wait unless it must throw.
  void present();
  // For a rank without input: blocks. Returns how many ranks have input.
  int absent();
  // The last count; waits for it.
  int n_active();

 private:
  Work count(std::int64_t mine);

  const Group group_;
  const JoinOptions options_;
  at::Tensor counted_;
  Work work_;
};

}  // namespace internal

// What can be shadowed: DistributedDataParallel, ZeroRedundancyOptimizer, and anything else that runs
// collectives in each iteration. A class of your own derives from it and calls begin_iteration() before its
// first collective of an iteration.
class Joinable {
 public:
  Joinable() = default;
  virtual ~Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  // The ranks it communicates with; never null.
  virtual const Group& join_group() const = 0;
  // Before the body. Raises kUsage when it cannot be shadowed in its current configuration.
  virtual void enter_join(const JoinOptions& options);
  // On a rank without input, once for each iteration that others begin: runs its collectives, in the same
  // order. Returns false when the iteration ended there (an evaluation, a pass that only accumulates); the
  // joinables after it in the list are then not shadowed.
  virtual bool shadow_iteration() = 0;
  // On all ranks, once no rank has input. `is_last_joiner`: this rank was among the last to exhaust its
  // input.
  virtual void finish_join(bool is_last_joiner);
  // Called last, whatever the outcome; without finish_join() when something was raised.
  virtual void leave_join() noexcept;

 protected:
  // Announces that this rank has input for another iteration. No effect outside of join(), nor for a joinable
  // that is not the first of the list. Raises InputsExhausted if throw_on_early_termination is set.
  void begin_iteration();
  // Null outside of join().
  const JoinOptions* join_options() const { return count_ ? &count_->options() : nullptr; }
  // How many ranks have input in this iteration; inside join() only. Waits for the count.
  int n_active() const { return count_->n_active(); }

 private:
  friend class Joining;
  std::shared_ptr<internal::ActiveRanks> count_;
  bool is_first_ = false;
};

// One entry of join's list. Implicit, so that {*model, optimizer} is such a list.
class JoinTarget {
 public:
  template <class T>
  requires(!std::is_same_v<std::remove_const_t<T>, JoinTarget>) JoinTarget(T& object)
      : joinable_(checked(object)) {}
  Joinable& get() const { return *joinable_; }
  operator Joinable&() const { return *joinable_; }

 private:
  template <class T>
  static Joinable* checked(T& object) {
    static_assert(std::is_base_of_v<Joinable, T>,
                  "join: this is not a Joinable. Name the DistributedDataParallel model (*model) and, if "
                  "there is one, the "
                  "ZeroRedundancyOptimizer; a plain torch::optim optimizer runs no collectives, so leave it "
                  "out of the list");
    if constexpr (std::is_base_of_v<Joinable, T>) return &object;
    return nullptr;
  }
  Joinable* joinable_;
};

// Runs the body, then shadows the others until no rank has input left. Blocks, each wait for at most the
// group's timeout. An exception of the body propagates, without shadowing: the other ranks then wait for this
// one until they time out. Raises kUsage when there is no joinable, when their groups differ or when one is
// already being joined; InputsExhausted as described above; what the joinables raise.
void join(const std::vector<JoinTarget>& joinables, const std::function<void()>& body,
          JoinOptions options = {});

}  // namespace lockstep
