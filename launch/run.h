// `lockstep run`: one job's workers on this host, from start to end.
#pragma once

#include "launch/run_options.h"

namespace lockstep::launch {

// Starts the workers, passes their output on, stops all when one fails. Returns the exit code for the shell: that
// of the first worker that failed (128 + signal when a signal ended it), else 0. Raises kUsage for options that
// make no sense, DistNetworkError when the port is taken.
//
// Takes over SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 of the process.
int run(const RunOptions& options);

}  // namespace lockstep::launch
