// `lockstep env`: what lockstep detects in this environment. Thread safety: not concurrently with setenv.
#pragma once

#include <string>

namespace lockstep::launch {

// The result of detect_cluster(), and every variable of the table that is set. Never includes a secret.
std::string environment_report();

}  // namespace lockstep::launch
