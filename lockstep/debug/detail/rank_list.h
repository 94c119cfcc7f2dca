// Formats ranks for messages. Thread safety: values, no shared state.
#pragma once

#include <string>
#include <vector>

namespace lockstep::internal {

// "0 3 5"; long lists are truncated.
std::string list_ranks(const std::vector<int>& ranks);
// The same as a subject: "rank 3", "ranks 1 2".
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace lockstep::internal
