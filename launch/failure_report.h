// The report of a failed job: which worker failed first on its own, how, when, and its last output; then the
// other failures. Thread safety: values, no shared state.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/process/supervisor.h"

namespace lockstep::launch {

struct FailureFacts {
  int first_rank = 0;  // first rank of this host's workers
  std::string host;
  std::string program;
  process::ChildExit first;  // the root cause, or the first that lost a peer when none failed on its own
  const std::vector<process::ChildExit>& exits;
  std::function<std::string(int worker)> error_file;  // content of its TORCHELASTIC_ERROR_FILE
  const std::deque<std::string>& last_errors;         // last stderr lines of the first that failed
};

// Several lines, without a trailing newline.
std::string failure_report(const FailureFacts& facts);

std::string host_name();

}  // namespace lockstep::launch
