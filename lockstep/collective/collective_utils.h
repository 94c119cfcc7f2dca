// One rank computes and all get the result, or every rank computes and all get all results. An exception that
// the function throws is raised on every rank, naming the rank that threw: no rank waits for one that has
// already failed, and no rank continues alone.
//
//   auto vocabulary = broadcast_result([] { return load("words.txt"); }, {.stage = "load the vocabulary"});
//   auto sizes = all_gather_results([&] { return shard.size(); });
//
// Collectives: every member calls the same one. Results are values that object.h can encode, or void. The
// function may take long: the others wait as long as the timeout allows.
// Thread safety: as objects.h; the function runs on the calling thread.
// Errors: the same on every rank. An exception that the function threw keeps its kind (kUsage for exceptions
// that are not lockstep's), and the group stays usable after it; also the errors of objects.h. On a process
// that is not a member: a warning; the function is not called and a default-constructed result is returned.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "lockstep/collective/objects.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/world.h"

namespace lockstep {

namespace internal {

// The outcome of a function: its result, or the kind and the message of what it threw.
template <class T>
using Outcome = std::tuple<std::optional<std::conditional_t<std::is_void_v<T>, bool, T>>, int, std::string>;

// Inside a catch block: kind and message of what was thrown.
std::pair<int, std::string> thrown_by_function();

template <class Fn>
auto outcome_of(Fn& fn) {
  using T = std::invoke_result_t<Fn&>;
  Outcome<T> outcome;
  try {
    if constexpr (std::is_void_v<T>) {
      fn();
      std::get<0>(outcome) = true;
    } else {
      std::get<0>(outcome) = fn();
    }
  } catch (...) {
    std::tie(std::get<1>(outcome), std::get<2>(outcome)) = thrown_by_function();
  }
  return outcome;
}

// One call, for messages.
struct ResultCall {
  const char* name;
  const std::string& stage;
  const Group& group;
  const std::source_location& where;

  struct Thrown {
    int rank;  // in the world
    int kind;
    std::string message;
  };
  // Raises the first, naming all. The list must not be empty.
  [[noreturn]] void raise_thrown(const std::vector<Thrown>& thrown) const;
  // Rank in the world of the member that the caller named; raises kUsage when it is not a member.
  int world_rank_of(std::optional<int> in_world, std::optional<int> in_group) const;
};

}  // namespace internal

struct BroadcastResultOptions {
  std::optional<int> src{};  // the rank that computes, in the world; neither: rank 0 of the group
  std::optional<int> group_src{};
  std::string stage{};  // what is done, for messages
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Calls `fn` on one rank; every rank returns its result.
template <class Fn>
std::invoke_result_t<Fn&> broadcast_result(Fn&& fn, BroadcastResultOptions options = {}) {
  using T = std::invoke_result_t<Fn&>;
  const internal::ResultCall call{"broadcast_result", options.stage, options.group, options.where};
  std::vector<internal::Outcome<T>> list(1);
  if (get_rank(options.group) >= 0) {
    const int src = call.world_rank_of(options.src, options.group_src);
    // Ranks of the group's world, which need not be the default one.
    if (get_global_rank(options.group, get_rank(options.group)) == src)
      list.front() = internal::outcome_of(fn);
    broadcast_object_list(
        list, {.src = src, .group = options.group, .timeout = options.timeout, .where = options.where});
    auto& [value, kind, message] = list.front();
    if (!value) call.raise_thrown({{src, kind, message}});
  } else {
    broadcast_object_list(list, {.src = 0, .group = options.group, .where = options.where});  // warns
    std::get<0>(list.front()).emplace();
  }
  if constexpr (!std::is_void_v<T>) return std::move(*std::get<0>(list.front()));
}

struct AllGatherResultsOptions {
  std::string stage{};
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Calls `fn` on every rank; all return all results, by rank in the group, or nothing when it returns void.
// When `fn` threw on some ranks, every rank raises, naming them all.
template <class Fn>
auto all_gather_results(Fn&& fn, AllGatherResultsOptions options = {}) {
  using T = std::invoke_result_t<Fn&>;
  const internal::ResultCall call{"all_gather_results", options.stage, options.group, options.where};
  const int size = get_world_size(options.group);
  std::vector<internal::Outcome<T>> list(size > 0 ? static_cast<std::size_t>(size) : 0);
  const auto mine = size > 0 ? internal::outcome_of(fn) : internal::Outcome<T>();
  all_gather_object(list, mine, {.group = options.group, .timeout = options.timeout, .where = options.where});
  std::vector<internal::ResultCall::Thrown> thrown;
  for (std::size_t r = 0; r < list.size(); ++r) {
    const auto& [value, kind, message] = list[r];
    if (!value) thrown.push_back({get_process_group_ranks(options.group)[r], kind, message});
  }
  if (!thrown.empty()) call.raise_thrown(thrown);
  if constexpr (!std::is_void_v<T>) {
    std::vector<T> results;
    for (auto& outcome : list) results.push_back(std::move(*std::get<0>(outcome)));
    return results;
  }
}

struct CheckRngSyncOptions {
  std::optional<at::Generator> generator{};  // unset: the default CPU generator
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Compares the state of a random number generator between the ranks. Raises kUsage on every rank, saying
// which ranks have which state, when they differ: values that all ranks are expected to draw identically
// (dropout masks of replicated layers, permutations) would then differ. Rank threads share the default
// generator.
void check_rng_sync(CheckRngSyncOptions options = {});

}  // namespace lockstep
