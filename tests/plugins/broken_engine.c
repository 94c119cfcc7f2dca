/* Engines that must be refused, one per BROKEN value given by the build. */
#include "lockstep/engine/engine_abi.h"

#if defined(BROKEN_NO_SYMBOL)

int lockstep_some_other_symbol = 1;

#else

__attribute__((visibility("default"))) const lockstep_engine* lockstep_engine_v1(void);

const lockstep_engine* lockstep_engine_v1(void) {
#if defined(BROKEN_NULL)
  return 0;
#else
  static const lockstep_engine table = {
#if defined(BROKEN_SHORT)
    .struct_size = offsetof(lockstep_engine, post),
#else
    .struct_size = sizeof(lockstep_engine),
#endif
#if defined(BROKEN_VERSION)
    .abi_version = LOCKSTEP_ENGINE_ABI_VERSION + 41,
#else
    .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
#endif
    .name = "broken",
  };
  return &table;
#endif
}

#endif
