#include "lockstep/debug/detail/store_gather.h"

#include <algorithm>
#include <chrono>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/debug/detail/rank_list.h"

namespace lockstep::internal {
namespace {

// The first byte of rank 0's result: whether all ranks arrived.
constexpr char kAllCame = '+';
constexpr char kGaveUp = '-';

std::string contribution_key(std::uint64_t number, std::size_t rank) {
  return base::cat(number, "/word/", rank);
}

std::string verdict_key(std::uint64_t number) {
  return base::cat(number, "/verdict");
}

// How long a wait lasts before still_worth_it() is called.
constexpr Milliseconds kSlice{200};

// False when the deadline passed first. A slow wait logs waiting().
bool wait_for(Store& store, const std::vector<std::string>& keys, Deadline deadline,
              const std::function<void()>& still_worth_it, const std::function<std::string()>& waiting) {
  base::SlowWait slow(deadline);
  while (!deadline.expired()) {
    if (still_worth_it) still_worth_it();
    try {
      store.wait(keys, std::min(kSlice, slow.quiet_slice()));
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    slow.say_if_due(waiting);
  }
  return store.check(keys);
}

[[noreturn]] void raise_timeout(const std::string& who, const std::string& text) {
  base::raise(ErrorKind::kTimeout, base::cat(who, ": ", text), ErrorFamily::kBackend);
}

}  // namespace

StoreGather::StoreGather(Store& store, int rank, std::vector<int> ranks)
    : store_(store.clone()), rank_(rank), ranks_(std::move(ranks)) {}

std::string StoreGather::gather(std::uint64_t number, const std::string& mine, const Options& options,
                                const std::function<std::string(const std::vector<std::string>&)>& decide) {
  return rank_ == 0 ? lead(number, mine, options, decide) : follow(number, mine, options);
}

std::vector<int> StoreGather::missing(const std::vector<std::string>& keys) {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!store_->check({&keys[i], 1})) ranks.push_back(ranks_[i + 1]);
  }
  return ranks;
}

std::string StoreGather::lead(std::uint64_t number, const std::string& mine, const Options& options,
                              const std::function<std::string(const std::vector<std::string>&)>& decide) {
  std::vector<std::string> keys;
  for (std::size_t rank = 1; rank < ranks_.size(); ++rank) keys.push_back(contribution_key(number, rank));
  std::vector<int> late;
  const auto deadline = options.one_look ? Deadline::now() : Deadline::after(options.timeout);
  const auto waiting = [&] {
    return base::cat(options.who, ": this rank waits for ", name_ranks(missing(keys)));
  };
  if (!wait_for(*store_, keys, deadline, options.still_worth_it, waiting)) late = missing(keys);
  if (!late.empty()) {
    if (!options.name_all) late.resize(1);
    const std::string text =
        base::cat(name_ranks(late), " did not arrive within ", options.timeout.count(), " ms");
    store_->set(verdict_key(number), kGaveUp + text);
    raise_timeout(options.who, text);
  }
  std::vector<std::string> contributions{mine};
  for (const auto& one : store_->multi_get(keys)) contributions.push_back(to_text(one));
  std::string verdict = decide(contributions);
  store_->set(verdict_key(number), kAllCame + verdict);
  for (const auto& key : keys) store_->delete_key(key);
  // All came here, so all have read what was said at the gather before.
  if (number > 0) store_->delete_key(verdict_key(number - 1));
  return verdict;
}

std::string StoreGather::follow(std::uint64_t number, const std::string& mine, const Options& options) {
  store_->set(contribution_key(number, static_cast<std::size_t>(rank_)), mine);
  const auto key = verdict_key(number);
  const auto waiting = [&] {
    return base::cat(options.who, ": this rank waits for rank ", ranks_.front(),
                     ", which waits for the others");
  };
  if (!wait_for(*store_, {key}, Deadline::after(std::max(options.patience, options.timeout)),
                options.still_worth_it, waiting)) {
    raise_timeout(
        options.who,
        base::cat("this rank arrived, but rank ", ranks_.front(), " did not answer within ",
                  std::max(options.patience, options.timeout).count(), " ms; it may not have arrived"));
  }
  const std::string verdict = to_text(store_->get(key));
  if (verdict.empty())
    base::raise(ErrorKind::kInternal, base::cat(options.who, ": rank 0 published no result"));
  if (verdict.front() == kAllCame) return verdict.substr(1);
  raise_timeout(options.who, base::cat("this rank arrived, but rank ", ranks_.front(),
                                       " gave up waiting: ", verdict.substr(1)));
}

}  // namespace lockstep::internal
