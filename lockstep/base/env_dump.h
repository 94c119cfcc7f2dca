// The environment of a distributed job as text, for bug reports.
#pragma once

#include <string>

namespace lockstep {

// One line per variable, "env:NAME=value" or "env:NAME=N/A": what torch's dump for DDP names (the ranks, the master,
// CUDA_VISIBLE_DEVICES, GLOO_* and NCCL_*), then every other variable of lockstep's own table. The job's secret is in none.
std::string dump_environment();

}  // namespace lockstep
