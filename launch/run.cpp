#include "launch/run.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <vector>

#include "launch/failure_report.h"
#include "launch/nodes.h"
#include "launch/open_files.h"
#include "launch/output.h"
#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/process/handled_signal.h"
#include "lockstep/process/job_server.h"
#include "lockstep/process/report.h"
#include "lockstep/process/supervisor.h"

namespace lockstep::launch {

using namespace process;

namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

// What the launcher was started with: a shell gives background jobs of a script an ignored SIGINT, nohup an
// ignored SIGHUP. A blocked signal reaches a signalfd even when it is ignored, so such ones must not be
// blocked.
bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

// The signals the launcher passes on, as a descriptor, from before it has workers until they are gone.
class PassedSignals {
 public:
  PassedSignals() {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int signal : kSignals) {
      if (!is_ignored(signal)) ::sigaddset(&set, signal);
    }
    ::pthread_sigmask(SIG_BLOCK, &set, &before_);
    fd_.reset(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_) base::raise(base::system_failure(errno, "signalfd"));
  }
  ~PassedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  PassedSignals(const PassedSignals&) = delete;
  PassedSignals& operator=(const PassedSignals&) = delete;
  int fd() const { return fd_.get(); }
  const sigset_t& mask_before() const { return before_; }
  std::optional<int> take() const {
    signalfd_siginfo info{};
    if (::read(fd_.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return std::nullopt;
    return static_cast<int>(info.ssi_signo);
  }

 private:
  sigset_t before_{};
  base::Fd fd_;
};

class Job {
 public:
  Job(const RunOptions& options, const RunPlan& plan)
      : worker_open_files_(raise_open_files()),
        options_(options),
        plan_(plan),
        host_(JobServer::open({.address = plan.master_addr,
                               .port = plan.master_port,
                               .shared = plan.n_nodes > 1,
                               .holds_store = plan.node_rank == 0})),
        nodes_(host_, plan),
        output_({.n_workers = plan.n_workers,
                 .first_rank = plan.first_rank(),
                 .role = options.role,
                 .prefix = options.prefix,
                 .prefix_template = base::environment(base::EnvVar::kLogLinePrefixTemplate).value_or(""),
                 .colour = !base::environment(base::EnvVar::kNoColor)}),
        notes_(plan.n_workers) {}

  //   start: pipes, secret, reports; fork the tree --> serve: the store's thread --> watch: one poll loop --> finish: drain, report
  //
  // Workers are started before the store serves: their connections wait in the listening socket's queue.
  // Everything in watch() happens on this thread, in one poll over children, signals and output.
  int run() {
    say_thread_count();
    {
      // Before the store's thread, so that none is delivered there.
      const PassedSignals signals;
      start(signals.mask_before());
      host_.serve();
      watch(signals);
    }
    return finish();
  }

 private:
  void say_thread_count() {
    sets_threads_ = plan_.n_workers > 1 && !base::environment(base::EnvVar::kOmpNumThreads);
    if (sets_threads_) {
      output_.say(base::cat("each worker gets OMP_NUM_THREADS=1, so that ", plan_.n_workers,
                            " workers do not fight for the cores; set it yourself to tune"));
    }
  }

  EnvironmentList worker_variables(int worker) const {
    const WorkerPlace place{.rank = plan_.first_rank() + worker,
                            .world_size = plan_.world_size(),
                            .local_rank = worker,
                            .local_world_size = plan_.n_workers,
                            .node_rank = plan_.node_rank,
                            .n_nodes = plan_.n_nodes,
                            .role = options_.role};
    EnvironmentList variables = worker_environment(place, host_.address());
    if (sets_threads_) variables.emplace_back(name_of(base::EnvVar::kOmpNumThreads), "1");
    // A file for whoever opens it, but one that no killed launcher can leave behind.
    variables.emplace_back(name_of(base::EnvVar::kElasticErrorFile),
                           base::cat("/proc/self/fd/", report_fd(worker)));
    variables.emplace_back(name_of(base::EnvVar::kLockstepNotes), notes_.variable(worker));
    return variables;
  }

  int report_fd(int worker) const { return reports_[static_cast<std::size_t>(worker)].get(); }

  void start(const sigset_t& signal_mask) {
    const base::Fd empty_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const std::optional<int> secret_fd = host_.address().secret_fd;
    std::vector<ChildSpec> specs;
    for (int worker = 0; worker < plan_.n_workers; ++worker) {
      reports_.push_back(make_report());
      ChildSpec spec{.argv = options_.command,
                     .environment = environment_with(worker_variables(worker)),
                     .standard_input = worker == 0 ? std::nullopt : std::optional(empty_input.get()),
                     .standard_output = output_.worker_stdout(worker),
                     .standard_error = output_.worker_stderr(worker)};
      spec.inherited.push_back(report_fd(worker));
      spec.inherited.push_back(notes_.fd());
      if (secret_fd) spec.inherited.push_back(*secret_fd);
      specs.push_back(std::move(spec));
    }
    supervisor_.emplace(ProcessTree::start(specs, {.adopt_orphans = true,
                                                   .child_signal_mask = signal_mask,
                                                   .child_open_files = worker_open_files_}),
                        SupervisorOptions{.grace = plan_.grace,
                                          .on_exit = [this](const ChildExit& exit) { note_exit(exit); },
                                          .on_failure = [this](const ChildExit& exit) { tell(exit); },
                                          .notes = &notes_});
    output_.close_worker_ends();
  }

  void note_exit(const ChildExit& exit) {
    const int rank = plan_.first_rank() + exit.index;
    host_.publish_exit(rank, exit);
    if (!exit.loss.empty() && !supervisor_->stopping())
      output_.say(base::cat("rank ", rank, " (pid ", exit.pid, ") ", exit.cause(), ", as it lost a peer"));
  }

  // The failure that ends the job.
  void tell(const ChildExit& exit) {
    const int rank = plan_.first_rank() + exit.index;
    output_.say(base::cat("rank ", rank, " (pid ", exit.pid, ") ", exit.cause(),
                          plan_.world_size() > 1 ? "; stopping the other workers" : ""));
    nodes_.tell_failure(base::cat("rank ", rank, " on ", host_name(), " ", exit.cause()));
  }

  void watch(const PassedSignals& signals) {
    while (!supervisor_->finished()) {
      std::vector<pollfd> fds = {{.fd = supervisor_->fd(), .events = POLLIN, .revents = 0},
                                 {.fd = signals.fd(), .events = POLLIN, .revents = 0}};
      output_.add_to(fds);
      const Deadline wake = std::min({supervisor_->next_deadline(), output_.due(), nodes_.due()});
      ::poll(fds.data(), fds.size(), wake.poll_timeout_ms());
      while (const auto signal = signals.take()) pass_on(*signal);
      output_.handle();
      supervisor_->step();
      if (supervisor_->holding()) nodes_.hurry();
      if (const auto why = nodes_.check(); why && !supervisor_->stopping()) {
        output_.say(base::cat(*why, "; stopping the workers of this host"));
        lost_elsewhere_ = true;
        supervisor_->stop(SIGTERM);
      }
    }
  }

  // The first request to end is the workers' to answer; a second one is an order.
  void pass_on(int signal) {
    if (signal == SIGUSR1 || signal == SIGUSR2) return pass_on_to_handlers(signal);
    if (signal_) {
      output_.say(base::cat(base::signal_name(signal), " again: killing all workers"));
      return supervisor_->kill();
    }
    signal_ = signal;
    output_.say(base::cat(base::signal_name(signal), " passed on to the workers; those left after ",
                          static_cast<double>(plan_.grace.count()) / 1000, " s are killed"));
    nodes_.tell_failure(
        base::cat("the workers on ", host_name(), " were stopped by ", base::signal_name(signal)));
    if (supervisor_->stopping()) return supervisor_->signal(signal);
    supervisor_->stop(signal);
  }

  // Each worker leads a session. Those that ended have left their numbers to others.
  void pass_on_to_handlers(int signal) {
    std::vector<pid_t> sessions = supervisor_->pids();
    for (const ChildExit& exit : supervisor_->exits()) std::erase(sessions, exit.pid);
    const int n = send_handled_signal(sessions, signal);
    output_.say(n == 0 ? base::cat(base::signal_name(signal),
                                   ": no process of the workers handles it, so that it is not passed on")
                       : base::cat(base::signal_name(signal), ": passed on to ", n,
                                   n == 1 ? " process" : " processes", " that handle it"));
  }

  // No worker is left; a signal may end this process now, for one if nobody reads its output.
  int finish() {
    const auto first = supervisor_->first_failure();
    output_.finish();
    if (first && !first->stopped) {
      report_failure(*first);
    } else if (first) {
      output_.say(base::cat("the workers were stopped; rank ", plan_.first_rank() + first->index, " ",
                            first->cause()));
    }
    output_.finish();
    nodes_.end(!first && !lost_elsewhere_ && !signal_);
    if (first) return first->exit_code();
    return lost_elsewhere_ ? 1 : 0;
  }

  void report_failure(const ChildExit& first) {
    const auto error_file = [this](int worker) { return read_report(report_fd(worker)); };
    output_.say(failure_report({.first_rank = plan_.first_rank(),
                                .host = host_name(),
                                .program = options_.command.front(),
                                .first = first,
                                .exits = supervisor_->exits(),
                                .error_file = error_file,
                                .last_errors = output_.last_errors(first.index)}));
  }

  const std::optional<rlimit> worker_open_files_;  // first: raised before anything is opened
  const RunOptions& options_;
  const RunPlan& plan_;
  JobServer host_;
  Nodes nodes_;
  Output output_;
  std::vector<base::Fd> reports_;  // TORCHELASTIC_ERROR_FILE, one per worker
  base::LossNotes notes_;
  std::optional<Supervisor> supervisor_;
  bool sets_threads_ = false;
  bool lost_elsewhere_ = false;
  std::optional<int> signal_;
};

}  // namespace

int run(const RunOptions& options) {
  const RunPlan plan = make_plan(options);
  Job job(options, plan);
  return job.run();
}

}  // namespace lockstep::launch
