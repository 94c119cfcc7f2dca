// The report of a failed job: who failed first by itself, how, when, and its last words; then the other failures.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/process/supervisor.h"

namespace lockstep::launch {

struct FailureFacts {
  int first_rank = 0;  // of this host's workers
  std::string host;
  std::string program;
  ChildExit first;  // the root cause, or the first that lost a peer when nobody failed by itself
  const std::vector<ChildExit>& exits;
  std::function<std::string(int worker)> error_file;  // what it wrote to TORCHELASTIC_ERROR_FILE
  const std::deque<std::string>& last_errors;         // of the first that failed
};

// Several lines, without the end of the last.
std::string failure_report(const FailureFacts& facts);

std::string host_name();

}  // namespace lockstep::launch
