#include "lockstep/debug/debug.h"

#include <strings.h>

#include <atomic>
#include <string>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr int kUnread = -1;
std::atomic<int> g_level{kUnread};

}  // namespace

void set_debug_level_from_env() {
  const std::string given = base::environment(base::EnvVar::kDistributedDebug).value_or("OFF");
  const auto is = [&](const char* level) { return ::strcasecmp(given.c_str(), level) == 0; };
  if (is("OFF")) return set_debug_level(DebugLevel::kOff);
  if (is("INFO")) return set_debug_level(DebugLevel::kInfo);
  if (is("DETAIL")) return set_debug_level(DebugLevel::kDetail);
  base::raise(ErrorKind::kUsage, base::cat(name_of(base::EnvVar::kDistributedDebug), " is \"", given,
                                           "\"; it must be OFF, INFO or DETAIL"));
}

void set_debug_level(DebugLevel level) {
  g_level = static_cast<int>(level);
}

DebugLevel get_debug_level() {
  if (g_level == kUnread) set_debug_level_from_env();
  return static_cast<DebugLevel>(g_level.load());
}

}  // namespace lockstep
