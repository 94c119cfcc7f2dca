// What the dtensor suite times. Each function checks its results on every rank first, and throws when they
// are wrong. Collective: every rank calls with the same request.
#pragma once

#include <string>

#include "benchmarks/common/link.h"
#include "benchmarks/common/request.h"
#include "lockstep/mesh/device_mesh.h"

namespace bench {

// kind=add, kind=mul_: one operator on 8x8 without a gradient. "us" on DTensors cut by rows, "plain_us" on
// plain tensors of the same sizes.
std::string measure_operator(Link& link, const lockstep::DeviceMesh& mesh, const Request& request);

// kind=mlp: forward and backward of Linear, ReLU, Linear (batch, hidden, inner). "us" through
// parallelize_module, "hand_us" on half-size Linear layers with an all_reduce each way.
std::string measure_mlp(Link& link, const lockstep::DeviceMesh& mesh, const Request& request);

// kind=move: redistribution of a tensor of rows x columns. move=S_R, P_R, P_S, S_S (rows to columns), C_S
// (columns to rows) or C_R (columns to whole); place=shared or ordinary: where the local tensor lies. "us" is
// redistribute(), "bare_us" the bare collective with memory that is used again, "fresh_us" with a result that
// is allocated for each call; for P_R "copied_us" is the collective in place on a copy, in memory that is used
// again.
std::string measure_move(Link& link, const lockstep::DeviceMesh& mesh, const Request& request);

}  // namespace bench
