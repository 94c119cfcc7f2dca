#include "launch/failure_report.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <sstream>

#include "launch/line_merger.h"
#include "lockstep/base/text.h"

namespace lockstep::launch {
namespace {

constexpr int kFirstLines = 1000;  // of the root cause's error file
constexpr int kOtherLines = 3;     // of each other's

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

// The lines of `words`, each on a line of its own behind `lead`; long texts are cut.
std::string quoted(const std::string& words, const char* lead, int most) {
  std::istringstream lines(words);
  std::string text;
  for (std::string line; most > 0 && std::getline(lines, line); --most) text += cat(lead, line);
  return text;
}

std::string other_failure(const FailureFacts& facts, const ChildExit& exit) {
  return cat("\n  also failed: rank ", facts.first_rank + exit.index, " (local rank ", exit.index, ", pid ",
             exit.pid, ") at ", time_text(exit.time), " ", exit.cause(),
             exit.loss.empty() ? "" : ", as it lost a peer",
             quoted(facts.error_file(exit.index), "\n    | ", kOtherLines));
}

// Who went in peace while others still needed it.
std::string early_leavers(const FailureFacts& facts) {
  std::vector<int> ranks;
  for (const ChildExit& exit : facts.exits) {
    if (!exit.failed() && !exit.stopped) ranks.push_back(facts.first_rank + exit.index);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks.empty() ? "" : cat("\n  ended before with code 0: rank ", rank_set_text(ranks));
}

}  // namespace

std::string failure_report(const FailureFacts& facts) {
  const ChildExit& first = facts.first;
  const char* heading = first.loss.empty()
                            ? "root cause (first that failed by itself)"
                            : "no worker of this host failed by itself; first that lost a peer";
  std::string text = cat("the job failed; ", heading, ":\n  rank    ", facts.first_rank + first.index,
                         " (local rank ", first.index, ")\n",  //
                         "  host    ", facts.host, "\n",       //
                         "  pid     ", first.pid, "\n",        //
                         "  cause   ", first.cause(), "\n",    //
                         "  time    ", time_text(first.time));
  if (!first.start_error.empty()) text += cat("\n  program ", facts.program);
  if (!first.loss.empty()) text += cat("\n  loss    ", first.loss, early_leavers(facts));
  if (const std::string words = facts.error_file(first.index); !words.empty())
    text += cat("\n  error file:", quoted(words, "\n    | ", kFirstLines));
  if (!facts.last_errors.empty()) {
    text += "\n  last lines of its stderr:";
    for (const std::string& line : facts.last_errors) text += cat("\n    | ", line);
  }
  for (const ChildExit& exit : facts.exits) {
    const bool by_our_hand = exit.stopped && WIFSIGNALED(exit.status);
    if (!exit.failed() || exit.index == first.index || by_our_hand) continue;
    text += other_failure(facts, exit);
  }
  return text;
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "this host";
  return name;
}

}  // namespace lockstep::launch
