// The environment of a distributed job as text, for bug reports. Thread safety: any thread, except
// concurrently with setenv.
#pragma once

#include <string>

namespace lockstep {

// One line per variable, "env:NAME=value" or "env:NAME=N/A": the variables of torch's dump for DDP (the
// ranks, the master, CUDA_VISIBLE_DEVICES, GLOO_* and NCCL_*), then every other variable of lockstep's own
// table. None of them contains the job secret.
std::string dump_environment();

}  // namespace lockstep
