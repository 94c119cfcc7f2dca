// The three policies for when a gradient is ready; readiness.h documents the calls and their order. Thread
// safety: none; on_forward between passes, the rest on the thread that runs backward().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <span>
#include <vector>

#include "lockstep/ddp/internal/usage_exchange.h"
#include "lockstep/tensor/torch_compat.h"

namespace lockstep::internal {

enum class GradientState : std::uint8_t {
  kMoreToCome,  // the gradient stays local for now
  kReady,
  kUnexpected,  // not recorded in the static graph
};

struct Use {
  bool here = true;      // false: its gradient, if any, is not from this pass
  bool anywhere = true;  // false: no rank used it; known from wait_usage() on
  bool required = true;  // when it is ready, an undefined gradient is an error
};

// The input of the search after a forward pass.
struct ForwardGraph {
  std::span<const at::Tensor> outputs;
  std::span<const compat::NodePtr> entries;       // further nodes that the pass may reach
  std::span<const compat::NodePtr> accumulators;  // by parameter
  bool first = true;  // first forward pass the next backward pass may belong to: discard earlier ones
};

class AllParameters final {
 public:
  explicit AllParameters(std::size_t n_parameters) { arrival_.reserve(n_parameters); }
  bool searches() const { return false; }
  bool wants_announcement() const { return false; }
  void on_forward(const ForwardGraph&) {}
  void begin();
  bool ready_at_once(std::size_t) const { return false; }
  void note_use(std::size_t) {}
  GradientState on_gradient(std::size_t index, bool arrived);
  bool waits_for_end() const { return false; }
  void at_end() {}
  bool contributes(std::size_t) const { return true; }
  Use use(std::size_t) const { return {}; }
  const UsageExchange* usage() const { return nullptr; }
  bool exchanges_usage() const { return false; }
  void start_usage(bool) {}
  void wait_usage() {}
  void end(std::span<const BucketItem>, bool) {}
  bool has_one_order() const { return true; }
  std::span<const std::size_t> arrival() const { return arrival_; }
  void stop_recording() { records_ = false; }

 private:
  bool records_ = true;
  std::vector<std::size_t> arrival_;
};

class SearchedParameters final {
 public:
  SearchedParameters(std::size_t n_parameters, const Group& group, std::source_location where)
      : reached_(n_parameters, 0), usage_(n_parameters, group, where) {}
  bool searches() const { return true; }
  bool wants_announcement() const { return true; }  // a pass may reach no parameter at all
  void on_forward(const ForwardGraph& graph);
  void begin() {}
  bool ready_at_once(std::size_t index) const { return reached_[index] == 0; }
  void note_use(std::size_t index) { usage_.note(index); }
  GradientState on_gradient(std::size_t, bool) { return GradientState::kReady; }
  bool waits_for_end() const { return true; }
  void at_end() {}
  // A gradient may have accumulated inside no_sync.
  bool contributes(std::size_t index) const { return reached_[index] != 0 || usage_.here(index); }
  Use use(std::size_t index) const {
    return {.here = usage_.here(index), .anywhere = usage_.anywhere(index), .required = false};
  }
  const UsageExchange* usage() const { return &usage_; }
  bool exchanges_usage() const { return true; }
  void start_usage(bool with_zeros) { usage_.start(with_zeros); }
  void wait_usage() { usage_.wait(); }
  void end(std::span<const BucketItem> items, bool own);
  // Each pass may find different parameters, so the order of one is not representative.
  bool has_one_order() const { return false; }
  std::span<const std::size_t> arrival() const { return {}; }
  void stop_recording() {}

 private:
  std::vector<unsigned char>
      reached_;  // by the search from outputs of the forward passes that are expected back
  UsageExchange usage_;
};

class StaticGraph final {
 public:
  StaticGraph(std::size_t n_parameters, const Group& group, std::source_location where)
      : use_counts_(n_parameters, 0), to_come_(n_parameters, 0), usage_(n_parameters, group, where) {}
  bool searches() const { return false; }
  // If the graph contains none of the parameters, no hook begins the pass.
  bool wants_announcement() const;
  void on_forward(const ForwardGraph&) {}
  void begin();
  bool ready_at_once(std::size_t index) const { return !learning_ && use_counts_[index] == 0; }
  void note_use(std::size_t) {}
  GradientState on_gradient(std::size_t index, bool arrived);
  bool waits_for_end() const { return learning_; }
  void at_end();
  bool contributes(std::size_t index) const { return learning_ || use_counts_[index] != 0; }
  Use use(std::size_t index) const {
    const bool here = use_counts_[index] != 0;
    return {.here = here, .anywhere = usage_.anywhere(index), .required = here};
  }
  const UsageExchange* usage() const { return &usage_; }
  bool exchanges_usage() const { return learning_; }
  void start_usage(bool with_zeros) { usage_.start(with_zeros); }
  void wait_usage() { usage_.wait(); }
  void end(std::span<const BucketItem> items, bool own);
  bool has_one_order() const { return true; }
  std::span<const std::size_t> arrival() const { return arrival_; }
  void stop_recording() {}
  // Collective: copies what rank `root` of the group has learnt.
  void share(int root, const Group& group, std::source_location where);

 private:
  bool learning_ = true;
  std::vector<std::uint32_t> use_counts_;  // how often each hook runs in a pass
  std::vector<std::uint32_t> to_come_;     // remaining in the current pass
  std::vector<std::size_t> arrival_;       // by first use; unused ones last
  UsageExchange usage_;
};

}  // namespace lockstep::internal
