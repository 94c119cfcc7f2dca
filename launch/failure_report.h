// The report of a failed job: who failed first, how, when, and its last words; then who failed after it.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "lockstep/process/supervisor.h"

namespace lockstep::launch {

struct FailureFacts {
  int first_rank = 0;  // of this host's workers
  std::string host;
  std::string program;
  ChildExit first;
  std::string error_file;  // what the first that failed wrote to TORCHELASTIC_ERROR_FILE
  const std::vector<ChildExit>& exits;
  const std::deque<std::string>& last_errors;  // of the first that failed
};

// Several lines, without the end of the last.
std::string failure_report(const FailureFacts& facts);

std::string host_name();

}  // namespace lockstep::launch
