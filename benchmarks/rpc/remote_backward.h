// A backward pass through a Linear layer that lives in another worker, beside the same pass through one that
// lives here.
#pragma once

#include <string>

#include "benchmarks/common/request.h"

namespace bench {

// On the caller: batch=, hidden= and mode= (smart or fast) say what, `callee` is the worker. Takes both
// passes in turn and answers with their medians and the difference. Throws when the two gradients differ.
std::string measure_backward(const Request& request, const std::string& callee);

}  // namespace bench
