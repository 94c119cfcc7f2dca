// When a gradient is ready to be reduced: the policy of one reducer, chosen at construction.
//
//   AllParameters       each hook means ready; if a parameter's hook does not run, the pass never finishes.
//   SearchedParameters  find_unused_parameters: after each forward pass the graph is searched from the
//                       outputs. What is not found is ready when the pass begins; what was found and does not
//                       arrive is ready when it ends.
//   StaticGraph         the first pass counts how often each hook runs (more than once under reentrant
//                       checkpointing), and is reduced at its end. Later passes must match it: a parameter is
//                       ready after that many calls, and immediately if it was never called.
//
//     StaticGraph:  learning --end of the first pass, this rank's or shadowed--> learnt (final)
//
// The calls of one pass, in order; calls a policy does not need are no-ops:
//
//   on_forward(...)            after each forward pass that may be followed by a backward pass
//   begin()                    the pass begins
//   ready_at_once(i)           for every parameter: ready before any hook has run
//   note_use(i), on_gradient() each hook; note_use() also for gradients that stay local
//   at_end()                   only if waits_for_end(): the graph has been traversed; what has not arrived is
//                              ready now
//   start_usage(), wait_usage() with the last bucket; before the first average is delivered
//   use(i)                     what is known about a parameter's use
//   end()                      the averages have been delivered
//
// A policy is a plain class; the three are alternatives of a variant, so a hook costs a switch instead of a
// virtual call. Thread safety: none; on_forward between passes, the rest on the thread that runs backward().
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <variant>

#include "lockstep/ddp/internal/readiness_policies.h"

namespace lockstep::internal {

class Readiness final {
 public:
  template <class Policy>
  explicit Readiness(Policy policy) : policy_(std::move(policy)) {}

  // The outputs of a forward pass are needed.
  bool searches() const {
    return std::visit([](const auto& p) { return p.searches(); }, policy_);
  }
  // The beginning of a pass must be announced, since possibly no hook runs.
  bool wants_announcement() const {
    return std::visit([](const auto& p) { return p.wants_announcement(); }, policy_);
  }
  void on_forward(const ForwardGraph& graph) {
    std::visit([&](auto& p) { p.on_forward(graph); }, policy_);
  }
  void begin() {
    std::visit([](auto& p) { p.begin(); }, policy_);
  }
  bool ready_at_once(std::size_t index) const {
    return std::visit([&](const auto& p) { return p.ready_at_once(index); }, policy_);
  }
  void note_use(std::size_t index) {
    std::visit([&](auto& p) { p.note_use(index); }, policy_);
  }
  // `arrived`: the gradient is defined.
  GradientState on_gradient(std::size_t index, bool arrived) {
    return std::visit([&](auto& p) { return p.on_gradient(index, arrived); }, policy_);
  }
  bool waits_for_end() const {
    return std::visit([](const auto& p) { return p.waits_for_end(); }, policy_);
  }
  void at_end() {
    std::visit([](auto& p) { p.at_end(); }, policy_);
  }
  // False: this rank contributes zeros. A bucket of such parameters may be skipped if all ranks agree.
  bool contributes(std::size_t index) const {
    return std::visit([&](const auto& p) { return p.contributes(index); }, policy_);
  }
  Use use(std::size_t index) const {
    return std::visit([&](const auto& p) { return p.use(index); }, policy_);
  }
  // True: start_usage() with the last bucket and wait_usage() belong to this pass, on every rank.
  bool exchanges_usage() const {
    return std::visit([](const auto& p) { return p.exchanges_usage(); }, policy_);
  }
  void start_usage(bool with_zeros) {
    std::visit([&](auto& p) { p.start_usage(with_zeros); }, policy_);
  }
  void wait_usage() {
    std::visit([](auto& p) { p.wait_usage(); }, policy_);
  }
  // `own`: not a shadow of other ranks' pass.
  void end(std::span<const BucketItem> items, bool own) {
    std::visit([&](auto& p) { p.end(items, own); }, policy_);
  }
  // Null: every parameter is always used.
  const UsageExchange* usage() const {
    return std::visit([](const auto& p) { return p.usage(); }, policy_);
  }
  // Buckets may be rebuilt by arrival(), the parameters in the order of their gradients in the first pass; it
  // lacks some when this rank only shadowed that pass.
  bool has_one_order() const {
    return std::visit([](const auto& p) { return p.has_one_order(); }, policy_);
  }
  std::span<const std::size_t> arrival() const {
    return std::visit([](const auto& p) { return p.arrival(); }, policy_);
  }
  void stop_recording() {
    std::visit([](auto& p) { p.stop_recording(); }, policy_);
  }
  StaticGraph* static_graph() { return std::get_if<StaticGraph>(&policy_); }
  const StaticGraph* static_graph() const { return std::get_if<StaticGraph>(&policy_); }

 private:
  std::variant<AllParameters, SearchedParameters, StaticGraph> policy_;
};

}  // namespace lockstep::internal
