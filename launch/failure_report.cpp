#include "launch/failure_report.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <optional>
#include <sstream>
#include <string_view>

#include "launch/line_merger.h"
#include "lockstep/base/detail/text.h"

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
  return base::cat(day, fraction, " ", zone);
}

// The lines of `all`, each on a line of its own behind `lead`; long texts are cut.
std::string quoted(const std::string& all, const char* lead, int most) {
  std::istringstream lines(all);
  std::string text;
  for (std::string line; most > 0 && std::getline(lines, line); --most) text += base::cat(lead, line);
  return text;
}

// A JSON string whose opening quote has been read, up to its closing one; none when it is damaged, or has
// escapes that run_main does not write.
std::optional<std::string> read_json_string(std::istream& in) {
  std::string text;
  for (char c = 0; in.get(c);) {
    if (c == '"') return text;
    if (c == '\\') {
      if (!in.get(c)) break;
      if (c == 'u') {
        std::string code(4, '0');
        if (!in.read(code.data(), 4) || !code.starts_with("00")) return std::nullopt;
        c = static_cast<char>(std::strtol(code.c_str(), nullptr, 16));
      } else if (c != '"' && c != '\\') {
        return std::nullopt;
      }
    }
    text += c;
  }
  return std::nullopt;
}

// What run_main wrote when an exception left the program: torch's form, with nothing in it but text and time.
// Whatever else a program writes into its error file is shown as it is.
std::optional<std::string> uncaught_text(const std::string& report) {
  constexpr std::string_view kBegin = R"({"message": {"message": ")";
  constexpr std::string_view kMiddle = R"(, "extraInfo": {"timestamp": ")";
  if (!report.starts_with(kBegin)) return std::nullopt;
  std::istringstream in(report.substr(kBegin.size()));
  auto text = read_json_string(in);
  std::string rest;
  std::getline(in, rest, '\0');
  if (!rest.starts_with(kMiddle)) return std::nullopt;
  rest.erase(0, rest.find_first_not_of("0123456789", kMiddle.size()));
  return rest == "\"}}}\n" ? text : std::nullopt;
}

// The lines of stderr that do not only repeat `told`, which run_main prints behind "[rank1]: ".
std::vector<std::string> lines_beside(const std::deque<std::string>& lines, const std::string& told) {
  std::vector<std::string> others;
  for (const std::string& line : lines) {
    const auto colon = line.find("]: ");
    const bool by_run_main = line.starts_with("[rank") && colon != std::string::npos;
    if (!by_run_main || told.find(line.substr(colon + 3)) == std::string::npos) others.push_back(line);
  }
  return others;
}

std::string other_failure(const FailureFacts& facts, const process::ChildExit& exit) {
  const std::string report = facts.error_file(exit.index);
  return base::cat("\n  also failed: rank ", facts.first_rank + exit.index, " (local rank ", exit.index,
                   ", pid ", exit.pid, ") at ", time_text(exit.time), " ", exit.cause(),
                   exit.loss.empty() ? "" : ", as it lost a peer",
                   quoted(uncaught_text(report).value_or(report), "\n    | ", kOtherLines));
}

// Who went in peace while others still needed it.
std::string early_leavers(const FailureFacts& facts) {
  std::vector<int> ranks;
  for (const process::ChildExit& exit : facts.exits) {
    if (!exit.failed() && !exit.stopped) ranks.push_back(facts.first_rank + exit.index);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks.empty() ? "" : base::cat("\n  ended before with code 0: rank ", rank_set_text(ranks));
}

}  // namespace

std::string failure_report(const FailureFacts& facts) {
  const process::ChildExit& first = facts.first;
  const char* heading = first.loss.empty()
                            ? "root cause (first that failed by itself)"
                            : "no worker of this host failed by itself; first that lost a peer";
  std::string text = base::cat("the job failed; ", heading, ":\n  rank    ", facts.first_rank + first.index,
                               " (local rank ", first.index, ")\n",  //
                               "  host    ", facts.host, "\n",       //
                               "  pid     ", first.pid, "\n",        //
                               "  cause   ", first.cause(), "\n",    //
                               "  time    ", time_text(first.time));
  if (!first.start_error.empty()) text += base::cat("\n  program ", facts.program);
  const std::string report = facts.error_file(first.index);
  const auto uncaught = uncaught_text(report);
  if (!first.loss.empty()) {
    const bool told_below = uncaught && uncaught->find(first.loss) != std::string::npos;
    text += base::cat(told_below ? "" : base::cat("\n  loss    ", first.loss), early_leavers(facts));
  }
  if (!report.empty()) {
    text += base::cat(uncaught ? "\n  uncaught exception:" : "\n  error file:",
                      quoted(uncaught.value_or(report), "\n    | ", kFirstLines));
  }
  if (const auto lines = lines_beside(facts.last_errors, uncaught.value_or("")); !lines.empty()) {
    text += base::cat("\n  last lines of its stderr", uncaught ? " besides:" : ":");
    for (const std::string& line : lines) text += base::cat("\n    | ", line);
  }
  for (const process::ChildExit& exit : facts.exits) {
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
