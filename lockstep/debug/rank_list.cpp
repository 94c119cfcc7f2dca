#include "lockstep/debug/detail/rank_list.h"

#include "lockstep/base/detail/text.h"

namespace lockstep::internal {

std::string list_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kShown = 16;
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < kShown; ++i) text += base::cat(i == 0 ? "" : " ", ranks[i]);
  if (ranks.size() > kShown) text += base::cat(" and ", ranks.size() - kShown, " more");
  return text;
}

std::string name_ranks(const std::vector<int>& ranks) {
  return base::cat(ranks.size() == 1 ? "rank " : "ranks ", list_ranks(ranks));
}

}  // namespace lockstep::internal
