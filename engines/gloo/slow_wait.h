// Slow waits log once who waits for whom, where and until when, as all of lockstep's do
// (lockstep/base/detail/slow_wait.h, which a plug-in does not include: it has the ABI and the environment).
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::gloo_plugin {

// When a wait that begins now becomes slow (LOCKSTEP_SLOW_WAIT, read once); LOCKSTEP_NEVER: it logs nothing.
std::int64_t slow_from_now();

// "slow: <text>; waiting continues until 12:03:44 (in 290 s)".
std::string slow_line(const std::string& text, std::int64_t deadline_ns);

}  // namespace lockstep::gloo_plugin
