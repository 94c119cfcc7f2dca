// String building for headers and for code beside torch, where fmt must not appear (the torch wheel bundles
// another version of it). Thread safety: any thread.
#pragma once

#include <sstream>
#include <string>

namespace lockstep::base {

// cat("rank ", 3, " of ", 8) == "rank 3 of 8"
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace lockstep::base
