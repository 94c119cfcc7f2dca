#include "lockstep/nn/internal/norm_route.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/group/groups.h"
#include "lockstep/nn/internal/batch_statistics.h"
#include "lockstep/nn/sync_batch_norm.h"

namespace lockstep::internal {
namespace {

// Which collective comes next, agreed upon by the ranks that have input; nothing when no rank has.
struct Next {
  int layer;
  Pass pass;
};

// One small all_reduce before each collective of a layer. Ranks with input contribute the number of their
// layer and pass; ranks without learn it and shadow that collective. When no rank contributes, all have
// exhausted their input.
std::optional<Next> agree(const Group& group, std::optional<Next> mine) {
  // The maximum of the number and of its negative: whoever has input must say the same.
  constexpr auto kSilent = std::numeric_limits<std::int64_t>::min();
  const std::int64_t number = mine ? 2 * mine->layer + (mine->pass == Pass::kBackward ? 1 : 0) : 0;
  at::Tensor said = at::empty({2}, at::kLong);
  auto* const values = said.mutable_data_ptr<std::int64_t>();
  values[0] = mine ? number : kSilent;
  values[1] = mine ? -number : kSilent;
  all_reduce(said, {.op = ReduceOp::kMax, .group = group});
  if (values[0] == kSilent) return std::nullopt;
  if (values[0] != -values[1]) {
    base::raise(ErrorKind::kUsage,
                base::cat("SyncBatchNorm under join: ranks are in different layers, ", -values[1] / 2,
                          " and ", values[0] / 2, " of the model; all must run them in the same order"));
  }
  return Next{static_cast<int>(values[0] / 2), values[0] % 2 == 0 ? Pass::kForward : Pass::kBackward};
}

std::vector<std::int64_t> channels_of(const std::vector<SyncBatchNormImpl*>& layers) {
  std::vector<std::int64_t> channels;
  std::ranges::transform(layers, std::back_inserter(channels),
                         [](const SyncBatchNormImpl* layer) { return layer->options.num_features(); });
  return channels;
}

}  // namespace

// The same collective as SyncBatchNorm::forward, with an empty part: a count of 0 weighs nothing in the
// combined statistics.
void shadow_forward(std::int64_t channels, const Group& group, c10::Device device) {
  const at::Tensor part = describe_part({}, channels, device);
  all_gather_into_tensor(empty_parts(part, group->size()), part, {.group = group});
}

void shadow_backward(std::int64_t channels, const Group& group, c10::Device device) {
  all_reduce(empty_sums(channels, device), {.group = group});
}

void NormRoute::announce(Pass pass) const {
  if (announced_as) agree(group, Next{*announced_as, pass});
}

NormShadow::NormShadow(std::vector<SyncBatchNormImpl*> layers, const Group& group)
    : layers_(std::move(layers)),
      channels_(channels_of(layers_)),
      // A group of its own: its operations come in an order of their own.
      group_(new_group({.timeout = group->timeout(),
                        .parent = group,
                        .use_local_synchronization = true,
                        .desc = "background shadows of SyncBatchNorm"})) {}

// Aborted, not awaited: the other ranks may never come to the collective that the thread waits in.
NormShadow::~NormShadow() {
  if (thread_.joinable()) {
    group_->abort("the model of the background shadow is gone");
    thread_.join();
  }
  for (SyncBatchNormImpl* const layer : layers_) layer->route_ = nullptr;
}

void NormShadow::enter() {
  for (std::size_t i = 0; i < layers_.size(); ++i)
    layers_[i]->route_ = std::make_shared<NormRoute>(NormRoute{group_, static_cast<int>(i)});
}

// A thread, because these collectives are in the middle of the other ranks' forward and backward, while this
// rank's own thread shadows DDP's collectives at their end.
void NormShadow::shadow() {
  thread_ = base::Thread("ls-join-shadow", [this] { run(); });
}

// Ends when all ranks have exhausted their input. What goes wrong is raised by finish(), on the thread that
// trains.
void NormShadow::run() {
  try {
    while (const auto next = agree(group_, std::nullopt)) {
      const std::int64_t channels = channels_.at(static_cast<std::size_t>(next->layer));
      const c10::Device device = layers_[static_cast<std::size_t>(next->layer)]->device();
      next->pass == Pass::kForward ? shadow_forward(channels, group_, device)
                                   : shadow_backward(channels, group_, device);
    }
  } catch (...) {
    failure_ = base::current_failure();
  }
}

void NormShadow::finish() {
  thread_.join();
  for (SyncBatchNormImpl* const layer : layers_) layer->route_ = nullptr;
  if (failure_) base::raise(std::exchange(failure_, std::nullopt).value());
}

}  // namespace lockstep::internal
