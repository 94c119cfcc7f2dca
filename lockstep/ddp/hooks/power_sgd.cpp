#include "lockstep/ddp/hooks/power_sgd.h"

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/ddp/hooks/internal/average.h"
#include "lockstep/ddp/hooks/internal/low_rank.h"
#include "lockstep/ddp/hooks/internal/power_sgd_exchange.h"
#include "lockstep/tensor/tensor_object.h"

namespace lockstep {
namespace {

// No run draws more; a larger number in saved bytes means corruption, and skipping that many would take too
// long.
constexpr std::uint64_t kMostSeeds = 10'000'000'000;

void check(const PowerSGDOptions& options) {
  const auto refuse = [](const auto&... parts) {
    base::raise(ErrorKind::kUsage, base::cat("PowerSGDState: ", parts...));
  };
  if (options.matrix_approximation_rank < 1)
    refuse("matrix_approximation_rank must be positive, it is ", options.matrix_approximation_rank);
  if (options.start_powerSGD_iter <= 1 && (options.use_error_feedback || options.warm_start)) {
    refuse("start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start, it is ",
           options.start_powerSGD_iter,
           ": buckets are rebuilt after the first step, and what is kept per bucket would ", "no longer fit");
  }
  if (!(options.min_compression_rate > 0))
    refuse("min_compression_rate must be positive, it is ", options.min_compression_rate);
  if (!(options.orthogonalization_epsilon >= 0))
    refuse("orthogonalization_epsilon must not be negative, it is ", options.orthogonalization_epsilon);
  if (options.compression_stats_logging_frequency < 1) {
    refuse("compression_stats_logging_frequency must be positive, it is ",
           options.compression_stats_logging_frequency);
  }
}

}  // namespace

PowerSGDState::PowerSGDState(PowerSGDOptions options)
    : options_(std::move(options)), seeds_(std::make_unique<internal::SeedSequence>(options_.random_seed)) {
  check(options_);
  options_.group = internal::resolved(std::move(options_.group));
}

PowerSGDState::~PowerSGDState() = default;

// Called once per bucket, in the same order on all ranks. Invariant: at most one exchange is pending, and its
// second half starts before anything of the next bucket, so that all ranks start their collectives in the
// same order.
GradFuture PowerSGDState::run(GradBucket& bucket, Form form) {
  advance_pending(bucket.index());
  if (iter_ < options_.start_powerSGD_iter) {
    if (bucket.is_last()) end_step();
    return internal::average(bucket.buffer(), options_.group);
  }
  // Constructed before end_step(), so that the statistics logged there include this bucket.
  const auto exchange = std::make_shared<internal::PowerSGDExchange>(shared_from_this(), bucket, form);
  if (bucket.is_last()) end_step();
  if (exchange->is_plain()) return internal::average(bucket.buffer(), options_.group);
  exchange->start();
  // No later bucket would advance the last one.
  bucket.is_last() ? exchange->advance() : void(pending_ = exchange);
  return exchange->future();
}

// Buckets of a step come with ascending indices. An exchange that is not before `next_bucket` therefore
// belongs to an earlier step that was not completed, and its second half is never started.
void PowerSGDState::advance_pending(std::size_t next_bucket) {
  const auto pending = std::exchange(pending_, nullptr);
  if (!pending) return;
  if (pending->bucket() < next_bucket) return pending->advance();
  pending->abandon(
      base::cat("powerSGD_hook: the step of bucket ", pending->bucket(), " was given up before its end"));
}

void PowerSGDState::end_step() {
  if (++iter_ == options_.start_powerSGD_iter)
    base::log(LogLevel::kInfo, base::cat("powerSGD_hook: compression begins after ", iter_, " iterations"));
  if (iter_ <= options_.start_powerSGD_iter || iter_ < next_stats_report_) return;
  next_stats_report_ = iter_ + options_.compression_stats_logging_frequency;
  if (!base::log_enabled(LogLevel::kInfo)) return;
  const CompressionStats stats = compression_stats();
  base::log(LogLevel::kInfo,
            base::cat("powerSGD_hook: iteration ", iter_, ", ", stats.numel_before, " elements sent as ",
                      stats.numel_after, ", rate ", stats.compress_rate));
}

CompressionStats PowerSGDState::compression_stats() const {
  CompressionStats stats = stats_;
  if (stats.numel_after != 0) {
    stats.compress_rate = static_cast<double>(stats.numel_before) / static_cast<double>(stats.numel_after);
  }
  return stats;
}

at::Tensor PowerSGDState::error(std::size_t bucket) const {
  const auto found = memory_.find(bucket);
  return found == memory_.end() ? at::Tensor() : found->second.error;
}

at::Tensor PowerSGDState::q(std::size_t bucket) const {
  const auto found = memory_.find(bucket);
  return found == memory_.end() ? at::Tensor() : found->second.q;
}

// ---- saving ----

// The options are saved without the group, and of Memory only error and q: the rest is scratch space.
struct PowerSGDState::Saved {
  PowerSGDOptions options;
  std::int64_t iter = 0, next_stats_report = 0;
  std::uint64_t numel_before = 0, numel_after = 0, n_seeds = 0;
  std::map<std::uint64_t, at::Tensor> errors, qs;

  friend auto lockstep_fields(SelfOf<Saved> auto& self) {
    return fields({.name = "lockstep.PowerSGDState", .version = 1}, self.options.matrix_approximation_rank,
                  self.options.start_powerSGD_iter, self.options.min_compression_rate,
                  self.options.use_error_feedback, self.options.warm_start,
                  self.options.orthogonalization_epsilon, self.options.random_seed,
                  self.options.compression_stats_logging_frequency,
                  self.options.batch_tensors_with_same_shape, self.iter, self.next_stats_report,
                  self.numel_before, self.numel_after, self.n_seeds, self.errors, self.qs);
  }
};

Bytes PowerSGDState::save() const {
  Saved saved{.options = options_,
              .iter = iter_,
              .next_stats_report = next_stats_report_,
              .numel_before = stats_.numel_before,
              .numel_after = stats_.numel_after,
              .n_seeds = seeds_->n_drawn()};
  for (const auto& [bucket, memory] : memory_) {
    if (memory.error.defined()) saved.errors[bucket] = memory.error;
    if (memory.q.defined()) saved.qs[bucket] = memory.q;
  }
  return encode(saved);
}

std::shared_ptr<PowerSGDState> PowerSGDState::load(std::span<const std::uint8_t> bytes,
                                                   CommHookOptions options) {
  auto saved = decode<Saved>(bytes);
  if (saved.iter < 0 || saved.n_seeds > kMostSeeds)
    base::raise(ErrorKind::kUsage, "PowerSGDState::load: the bytes are damaged");
  if (!options.group)
    base::log(LogLevel::kWarn, "PowerSGDState::load: groups are not saved; the state uses the default group");
  saved.options.group = std::move(options.group);
  auto state = std::make_shared<PowerSGDState>(std::move(saved.options));
  state->iter_ = saved.iter;
  state->next_stats_report_ = saved.next_stats_report;
  state->stats_ = {.numel_before = saved.numel_before, .numel_after = saved.numel_after};
  // The random matrices continue as in an uninterrupted run.
  state->seeds_->skip(saved.n_seeds);
  for (auto& [bucket, error] : saved.errors) state->memory_[bucket].error = error.view({-1});
  for (auto& [bucket, q] : saved.qs) state->memory_[bucket].q = q.view({-1});
  return state;
}

// ---- hooks ----

CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state) {
  if (!state) base::raise(ErrorKind::kUsage, "powerSGD_hook: the state is null");
  return {.run = [state = std::move(state)](
                     GradBucket& bucket) { return state->run(bucket, PowerSGDState::Form::kPerMatrix); },
          .name = "powerSGD_hook"};
}

CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state) {
  if (!state) base::raise(ErrorKind::kUsage, "batched_powerSGD_hook: the state is null");
  return {.run = [state = std::move(state)](
                     GradBucket& bucket) { return state->run(bucket, PowerSGDState::Form::kBatched); },
          .name = "batched_powerSGD_hook"};
}

}  // namespace lockstep
