// For the tests of PowerSGD.
#pragma once

#include "lockstep/ddp/hooks/power_sgd.h"

namespace lockstep::hooks_testing {

// Two steps that average, then the compressed ones: the fewest that warm start and error feedback allow.
inline PowerSGDOptions from_step_2(PowerSGDOptions options) {
  options.start_powerSGD_iter = 2;
  return options;
}

}  // namespace lockstep::hooks_testing
