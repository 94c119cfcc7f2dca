#include "lockstep/process/supervisor.h"

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <system_error>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::process {
namespace {

constexpr Milliseconds kSweepGrace{5'000};    // for what ended children left behind
constexpr Milliseconds kKillTimeout{10'000};  // for processes that got SIGKILL to be gone
constexpr Milliseconds kHold{2'000};          // for the failure behind a failure

Deadline after_grace(Milliseconds grace) {
  return grace.count() <= 0 ? Deadline::now() : Deadline::after(grace);
}

}  // namespace

std::string ChildExit::cause() const {
  return start_error.empty() ? base::describe_wait_status(status) : start_error;
}

int ChildExit::exit_code() const {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

Supervisor::Supervisor(ProcessTree tree, SupervisorOptions options)
    : tree_(std::move(tree)), options_(std::move(options)), start_errors_(tree_.pids().size()) {}

//   running --a child failed by itself--> stopping (SIGTERM) --grace over--> killing --all gone, or 10 s--> finished
//      |  '--a child lost another------> holding, 2 s: whose failure was first?
//      '--all ended--> swept: SIGTERM to what they left behind --> finished
//
// Never blocks: called when fd() is readable or next_deadline() has passed.
void Supervisor::step() {
  if (finished_) return;
  for (const ChildEvent& event : tree_.take_events()) take(event);
  if (tree_.over()) {
    end_lost_children();
    finished_ = true;
    return;
  }
  const bool all_ended = exits_.size() == tree_.pids().size();
  if (holding() && (all_ended || hold_until_.expired())) end_hold();
  if (all_ended && !swept_) {
    swept_ = true;
    tree_.signal(SIGTERM);
    kill_at_ = std::min(kill_at_, after_grace(std::min(options_.grace, kSweepGrace)));
  }
  if (!kill_at_.expired()) return;
  if (!killing_) return kill();
  base::log(LogLevel::kError,
            "processes that received SIGKILL still exist after 10 s; they are left to the kernel");
  finished_ = true;
}

void Supervisor::take(const ChildEvent& event) {
  const auto index = static_cast<std::size_t>(event.index);
  if (event.kind == ChildEvent::Kind::kStartFailed) {
    start_errors_[index] = base::cat("cannot be executed: ", std::generic_category().message(event.value));
    return;
  }
  using std::chrono::system_clock;
  const system_clock::time_point time{
      std::chrono::duration_cast<system_clock::duration>(std::chrono::nanoseconds(event.realtime_ns))};
  add_exit({.index = event.index,
            .pid = event.pid,
            .status = event.value,
            .start_error = start_errors_[index],
            .time = time,
            .stopped = stopping_,
            .loss = {}});
}

void Supervisor::add_exit(ChildExit exit) {
  if (exit.failed() && options_.notes != nullptr) exit.loss = options_.notes->read(exit.index).value_or("");
  exits_.push_back(exit);
  if (options_.on_exit) options_.on_exit(exit);
  if (exit.failed() && !stopping_) judge(exit);
}

// What failed by itself ends the job at once; what failed because of another is held until that one is known.
void Supervisor::judge(const ChildExit& exit) {
  if (!exit.failed_by_itself()) {
    if (!holding()) hold_until_ = Deadline::after(kHold);
    return;
  }
  hold_until_ = Deadline::never();
  if (options_.on_failure) options_.on_failure(exit);
  stop(SIGTERM);
}

// No child failed on its own in time.
void Supervisor::end_hold() {
  hold_until_ = Deadline::never();
  const auto first = first_failure();
  if (stopping_ || !first) return;
  if (options_.on_failure) options_.on_failure(*first);
  stop(SIGTERM);
}

// The reaper was killed, and its records are lost. The children have died with it.
void Supervisor::end_lost_children() {
  if (!tree_.reaper_lost()) return;
  base::log(LogLevel::kError, "the reaper of the workers was killed, and the workers with it");
  stopping_ = true;
  for (std::size_t i = 0; i < tree_.pids().size(); ++i) {
    const auto same = [&](const ChildExit& exit) { return exit.index == static_cast<int>(i); };
    if (std::any_of(exits_.begin(), exits_.end(), same)) continue;
    add_exit({.index = static_cast<int>(i),
              .pid = tree_.pids()[i],
              .status = SIGKILL,
              .start_error = {},
              .time = std::chrono::system_clock::now(),
              .stopped = true,
              .loss = {}});
  }
}

void Supervisor::stop(int signal) {
  if (stopping_ || finished_) return;
  stopping_ = true;
  hold_until_ = Deadline::never();
  tree_.signal(signal);
  kill_at_ = after_grace(options_.grace);
}

void Supervisor::kill() {
  if (finished_) return;
  stopping_ = true;
  hold_until_ = Deadline::never();
  killing_ = true;
  tree_.kill();
  kill_at_ = Deadline::after(kKillTimeout);
}

std::optional<ChildExit> Supervisor::first_failure() const {
  const auto first = [this](auto&& matches) -> std::optional<ChildExit> {
    const auto found = std::find_if(exits_.begin(), exits_.end(), matches);
    return found == exits_.end() ? std::nullopt : std::optional(*found);
  };
  if (auto found = first([](const ChildExit& exit) { return exit.failed_by_itself(); })) return found;
  if (auto found = first([](const ChildExit& exit) { return exit.failed() && !exit.stopped; })) return found;
  return first([](const ChildExit& exit) { return exit.failed(); });
}

}  // namespace lockstep::process
