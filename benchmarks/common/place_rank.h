// Where a rank runs: bound to a core of its own, or in a network namespace that stands for a host.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/link.h"
#include "benchmarks/common/request.h"

namespace bench {

// The network namespaces of the argument namespaces=a,b; none without it.
inline std::vector<std::string> namespaces(const Request& arguments) {
  std::vector<std::string> names;
  std::istringstream words(arguments.text("namespaces", ""));
  for (std::string name; std::getline(words, name, ',');) names.push_back(name);
  return names;
}

// With namespaces, the first ranks enter the first one and so on, and run on any core, since engines across
// hosts have threads of their own. Without, the rank is bound to its core. Call while the process has one
// thread.
inline void place_rank(const Request& arguments, const Link& link) {
  const auto names = namespaces(arguments);
  if (names.empty()) return bind_to_core(link.rank());
  const auto rank = static_cast<std::size_t>(link.rank());
  const std::string& name = names[rank * names.size() / static_cast<std::size_t>(link.size())];
  const int file = ::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0 || ::setns(file, CLONE_NEWNET) != 0)
    throw std::runtime_error("cannot enter namespace " + name);
  ::close(file);
}

}  // namespace bench
