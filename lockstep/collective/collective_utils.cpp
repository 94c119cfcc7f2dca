#include "lockstep/collective/collective_utils.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <map>
#include <mutex>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/debug/detail/rank_list.h"
#include "lockstep/group/detail/sha1.h"

namespace lockstep {
namespace internal {

std::pair<int, std::string> thrown_by_function() {
  Failure failure = base::current_failure();
  try {
    throw;
  } catch (const Error&) {
  } catch (...) {
    failure.kind = ErrorKind::kUsage;  // the caller's function, not our own bug
  }
  return {static_cast<int>(failure.kind), failure.message};
}

namespace {

std::string prefix_of(const ResultCall& call) {
  char where[kWhereCapacity];
  write_where(call.where, where);
  const auto group = resolve(call.group);
  return base::cat(call.name, call.stage.empty() ? "" : base::cat(" \"", call.stage, "\""), " of group \"",
                   group->name(), "\" (rank ", group->rank(), " of ", group->size(), ", called at ", where,
                   "): ");
}

// A peer sent the number. It is input: a number outside of the enum must not become a value of it.
ErrorKind kind_from(int number) {
  return number >= 0 && number <= static_cast<int>(ErrorKind::kInternal) ? static_cast<ErrorKind>(number)
                                                                         : ErrorKind::kInternal;
}

}  // namespace

void ResultCall::raise_thrown(const std::vector<Thrown>& thrown) const {
  std::string text = prefix_of(*this);
  for (std::size_t i = 0; i < thrown.size(); ++i)
    text += base::cat(i == 0 ? "" : "; ", "rank ", thrown[i].rank, " threw: ", thrown[i].message);
  base::raise(kind_from(thrown.front().kind), std::move(text));
}

int ResultCall::world_rank_of(std::optional<int> in_world, std::optional<int> in_group) const {
  const auto members = resolve(group);
  // Rank 0 of the group, not of the world: the group may not contain that one.
  if (!in_world && !in_group) in_group = 0;
  std::string why;
  const int found = find_root(*members, {in_world, in_group, "src"}, why);
  if (found < 0) base::raise(ErrorKind::kUsage, prefix_of(*this) + why);
  return members->ranks()[static_cast<std::size_t>(found)];
}

}  // namespace internal

void check_rng_sync(CheckRngSyncOptions options) {
  // Named, because ResultCall holds references; a temporary would be gone before the message is made.
  const std::string stage;
  const internal::ResultCall call{"check_rng_sync", stage, options.group, options.where};
  // Hashes, not states: a Mersenne Twister's state is several kilobytes, and the message shows a prefix that
  // people can compare.
  const auto states = all_gather_results(
      [&] {
        at::Generator generator =
            options.generator ? *options.generator : at::detail::getDefaultCPUGenerator();
        // Another thread that draws at the same time would tear the state.
        const std::lock_guard lock(generator.mutex());
        const at::Tensor state = generator.get_state().contiguous();
        return internal::sha1(std::string(static_cast<const char*>(state.const_data_ptr()), state.nbytes()));
      },
      {.group = options.group, .timeout = options.timeout, .where = options.where});
  // Every rank has all states and comes to the same verdict, so either all raise or none does.
  std::map<std::string, std::vector<int>> ranks_with;
  for (std::size_t r = 0; r < states.size(); ++r)
    ranks_with[states[r]].push_back(get_process_group_ranks(options.group)[r]);
  if (ranks_with.size() <= 1) return;
  std::string text;
  for (const auto& [state, ranks] : ranks_with)
    text += base::cat(text.empty() ? "" : "; ", "ranks ", internal::list_ranks(ranks), " have ",
                      state.substr(0, 12));
  base::raise(ErrorKind::kUsage,
              base::cat(internal::prefix_of(call), "the generators are in different states (SHA-1): ", text,
                        "; seed them identically and draw the same numbers on all ranks"));
}

}  // namespace lockstep
