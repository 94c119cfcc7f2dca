// `lockstep env`: what lockstep finds in this environment.
#pragma once

#include <string>

namespace lockstep::launch {

// What detect_cluster() found, and every variable of the table that is set. Never the content of a secret.
std::string environment_report();

}  // namespace lockstep::launch
