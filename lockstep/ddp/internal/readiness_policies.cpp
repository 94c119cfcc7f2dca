#include "lockstep/ddp/internal/readiness_policies.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "lockstep/base/log.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/ddp/internal/graph.h"

namespace lockstep::internal {

// ---- AllParameters ----

void AllParameters::begin() {
  if (records_) arrival_.clear();
}

GradientState AllParameters::on_gradient(std::size_t index, bool) {
  if (records_) arrival_.push_back(index);
  return GradientState::kReady;
}

// ---- SearchedParameters ----

void SearchedParameters::on_forward(const ForwardGraph& graph) {
  if (graph.first) std::ranges::fill(reached_, 0);
  mark_reached(graph.outputs, graph.entries, graph.accumulators, reached_);
}

void SearchedParameters::end(std::span<const BucketItem> items, bool own) {
  if (!own) return;
  usage_.close(items);
  usage_.forget_here();
  if (usage_.is_first() && usage_.unused_bytes() == 0) {
    base::log(
        LogLevel::kWarn,
        "DistributedDataParallel: find_unused_parameters is set and the first backward pass used every "
        "parameter; the search costs a walk over the graph in each step. Leave it off if that is always so. "
        "Logged once.");
  }
}

// ---- StaticGraph ----

// While learning it is not known yet whether any hook will run.
bool StaticGraph::wants_announcement() const {
  return learning_ || std::ranges::all_of(use_counts_, [](std::uint32_t n) { return n == 0; });
}

void StaticGraph::begin() {
  if (learning_) arrival_.clear();
  to_come_ = use_counts_;
}

//   first pass   count how often each hook runs; nothing is ready before the end
//   later        ready when it has run as often as then; a parameter that was unused then must stay so
GradientState StaticGraph::on_gradient(std::size_t index, bool arrived) {
  if (!arrived) return GradientState::kMoreToCome;
  if (learning_) {
    if (use_counts_[index]++ == 0) arrival_.push_back(index);
    return GradientState::kMoreToCome;
  }
  if (use_counts_[index] == 0) return GradientState::kUnexpected;
  // 0 already: it is marked ready a second time, which is an error of its own.
  return to_come_[index] == 0 || --to_come_[index] == 0 ? GradientState::kReady : GradientState::kMoreToCome;
}

void StaticGraph::at_end() {
  for (std::size_t i = 0; i < use_counts_.size(); ++i) {
    if (use_counts_[i] != 0) {
      usage_.note(i);
    } else {
      arrival_.push_back(i);
    }
  }
}

void StaticGraph::end(std::span<const BucketItem> items, bool own) {
  if (own) usage_.close(items);
  learning_ = false;
}

// For a rank that only shadowed the first pass and has counted nothing.
void StaticGraph::share(int root, const Group& group, std::source_location where) {
  static_assert(sizeof(use_counts_.front()) == sizeof(int));
  at::Tensor counts = at::empty({static_cast<std::int64_t>(use_counts_.size())}, at::kInt);
  std::memcpy(counts.mutable_data_ptr(), use_counts_.data(), counts.nbytes());
  broadcast_from(root, counts, group, where);
  std::memcpy(use_counts_.data(), counts.const_data_ptr(), counts.nbytes());
}

}  // namespace lockstep::internal
