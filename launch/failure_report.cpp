#include "launch/failure_report.h"

#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <sstream>

#include "lockstep/base/text.h"

namespace lockstep::launch {
namespace {

// "2026-11-15 09:12:01.123 +0100"
std::string time_text(std::chrono::system_clock::time_point time) {
  const auto since = time.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(since - seconds).count();
  const std::time_t whole = seconds.count();
  std::tm local{};
  ::localtime_r(&whole, &local);
  char day[32];
  char zone[8];
  char fraction[8];
  std::strftime(day, sizeof day, "%F %T", &local);
  std::strftime(zone, sizeof zone, "%z", &local);
  std::snprintf(fraction, sizeof fraction, ".%03d", static_cast<int>(ms));
  return cat(day, fraction, " ", zone);
}

}  // namespace

std::string failure_report(const FailureFacts& facts) {
  const ChildExit& first = facts.first;
  std::string text = cat("the job failed; root cause (first failure seen):\n", "  rank    ",
                         facts.first_rank + first.index, " (local rank ", first.index, ")\n",  //
                         "  host    ", facts.host, "\n",                                       //
                         "  pid     ", first.pid, "\n",                                        //
                         "  cause   ", first.cause(), "\n",                                    //
                         "  time    ", time_text(first.time));
  if (!first.start_error.empty()) text += cat("\n  program ", facts.program);
  if (!facts.error_file.empty()) {
    std::istringstream lines(facts.error_file);
    text += "\n  error file:";
    for (std::string line; std::getline(lines, line);) text += cat("\n    | ", line);
  }
  if (!facts.last_errors.empty()) {
    text += "\n  last lines of its stderr:";
    for (const std::string& line : facts.last_errors) text += cat("\n    | ", line);
  }
  for (const ChildExit& exit : facts.exits) {
    const bool by_our_hand = exit.stopped && WIFSIGNALED(exit.status);
    if (!exit.failed() || exit.index == first.index || by_our_hand) continue;
    text += cat("\n  after it: rank ", facts.first_rank + exit.index, " (pid ", exit.pid, ") ", exit.cause());
  }
  return text;
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "this host";
  return name;
}

}  // namespace lockstep::launch
