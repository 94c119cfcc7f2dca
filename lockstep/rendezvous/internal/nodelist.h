// Slurm's short form of host names.
//
//   list   := item ("," item)*                       "node[003-005,9],gpu1"
//   item   := (text | "[" ranges "]")+               several brackets multiply: "r[1-2]n[1-2]"
//   ranges := range ("," range)*
//   range  := digits | digits "-" digits             numbers are as wide as the first: 003, 004, 005
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// All host names, in order. Raises kUsage naming the text when it is malformed or names more than 2^16 hosts.
std::vector<std::string> expand_nodelist(std::string_view text);

}  // namespace lockstep::internal
