// Calls as text, for messages.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/host/internal/layout.h"

namespace lockstep::comm::internal {

// "all_reduce(sum, f32, 1024 elements)", "broadcast(u8, 16 elements, root 2)", "barrier()".
std::string describe_call(std::uint64_t fingerprint);
// The above with its number and line: "all_reduce(...) #12 at train.cpp:33".
std::string describe_call(const PublishedCall& call);
// What a rank did last: "last entered ... ", or "has entered nothing yet".
std::string describe_last(CommBlock& block);

}  // namespace lockstep::comm::internal
