// `lockstep run`: runs one job's workers on this host. Thread safety: called once, from the main thread.
#pragma once

#include "launch/run_options.h"

namespace lockstep::launch {

// Starts the workers, forwards their output, stops all when one fails. Returns the exit code for the shell:
// that of the first worker that failed (128 + signal when killed by one), else 0. Raises kUsage for invalid
// options, DistNetworkError when the port is in use.
//
// Takes over SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 of the process.
int run(const RunOptions& options);

}  // namespace lockstep::launch
