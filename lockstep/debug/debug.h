// How much is checked and told. The debug level comes from TORCH_DISTRIBUTED_DEBUG or from here:
//   kOff     (default) nothing extra
//   kInfo    DDP tells how it was built and names parameters in its errors
//   kDetail  as kInfo; and groups made from now on compare every collective between their ranks before it runs: a rank
//            that is missing, or runs another collective or other shapes, is an error on every rank that names it,
//            instead of a hang. Costs several store round trips per collective. send and recv are not compared.
// Thread safety: every function may be called from any thread. The level is the process's.
#pragma once

namespace lockstep {

enum class DebugLevel : int { kOff = 0, kInfo = 1, kDetail = 2 };

// OFF, INFO or DETAIL in TORCH_DISTRIBUTED_DEBUG (any case; unset: OFF); raises kUsage naming another value.
void set_debug_level_from_env();
void set_debug_level(DebugLevel level);
// The first call reads the environment, unless a level was set; raises as set_debug_level_from_env.
DebugLevel get_debug_level();

}  // namespace lockstep
