// The cases of parity.py, trained by lockstep: the same models, data and options, two ranks, 20 steps.
#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/parity/record.h"

namespace parity {

constexpr int kRanks = 2;

struct Case {
  std::string name;
  // Trains as one of kRanks ranks, in the default group. Collective.
  std::function<Record(int rank, at::ScalarType dtype)> train;
  bool in_f32 = true;  // and not in f64 only
};

// In the order of parity.py.
const std::vector<Case>& cases();
// `plain` with gradients divided by one rank too many: what every comparison must notice.
Record train_with_broken_divisor(int rank, at::ScalarType dtype);

}  // namespace parity
