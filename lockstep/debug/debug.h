// How much is checked and logged. The debug level is set by TORCH_DISTRIBUTED_DEBUG or here:
//   kOff     (default) nothing extra
//   kInfo    DDP logs its configuration and names parameters in its errors
//   kDetail  as kInfo; and groups created from now on compare every collective across their ranks before it
//            runs: a rank that is missing, or runs another collective or other shapes, becomes an error that
//            names it on every rank instead of a hang. Costs several store round trips per collective. send
//            and recv are not compared.
// Thread safety: every function may be called from any thread. The level is per process.
#pragma once

namespace lockstep {

enum class DebugLevel : int { kOff = 0, kInfo = 1, kDetail = 2 };

// OFF, INFO or DETAIL in TORCH_DISTRIBUTED_DEBUG (any case; unset: OFF); raises kUsage for any other value.
void set_debug_level_from_env();
void set_debug_level(DebugLevel level);
// The first call reads the environment, unless a level was set; raises as set_debug_level_from_env.
DebugLevel get_debug_level();

}  // namespace lockstep
