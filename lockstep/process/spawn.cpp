#include "lockstep/process/spawn.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/process/internal/signals_blocked.h"
#include "lockstep/process/internal/spawn_child.h"
#include "lockstep/process/job_server.h"
#include "lockstep/process/report.h"
#include "lockstep/process/supervisor.h"

namespace lockstep {

using namespace process;
using internal::SpawnTarget;

// The processes are watched by a thread from the start, so that a failure is reported and the others are
// stopped even while nobody joins.
struct SpawnContext::State {
  explicit State(Milliseconds grace_in) : grace(grace_in) {}

  // Constant after construction.
  std::vector<pid_t> pids;
  std::vector<base::Fd> reports;  // memfds; each process writes the text of its exception into its own
  std::optional<base::LossNotes> notes;
  base::Fd wake{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};

  // The watcher's own.
  std::optional<JobServer> host;
  std::optional<Supervisor> supervisor;

  base::Mutex mutex;
  base::ConditionVariable changed;
  bool kill LOCKSTEP_GUARDED_BY(mutex) = false;
  Milliseconds grace LOCKSTEP_GUARDED_BY(mutex);
  bool done LOCKSTEP_GUARDED_BY(mutex) = false;
  std::optional<SpawnError> error LOCKSTEP_GUARDED_BY(mutex);
  std::optional<Failure> broken LOCKSTEP_GUARDED_BY(mutex);  // the watcher itself failed

  base::Thread watcher;  // last: joined before the rest is destroyed

  ~State() {
    {
      const base::MutexLock lock(mutex);
      kill = true;
    }
    poke();
    watcher.join();
  }
  void poke() noexcept {
    const std::uint64_t one = 1;
    (void)!::write(wake.get(), &one, sizeof one);
  }
  void watch() noexcept;
  void watch_to_end();
  SpawnError describe(const ChildExit& exit) const;
};

// The supervisor and the store end before `done` is set: whoever sees it finds no process and no port left.
void SpawnContext::State::watch() noexcept {
  std::optional<Failure> failure;
  try {
    watch_to_end();
  } catch (...) {
    failure = base::current_failure();
  }
  std::optional<ChildExit> first = supervisor->first_failure();
  supervisor.reset();
  host.reset();
  const base::MutexLock lock(mutex);
  if (first) error = describe(*first);
  broken = std::move(failure);
  done = true;
  changed.notify_all();
}

void SpawnContext::State::watch_to_end() {
  while (!supervisor->finished()) {
    pollfd fds[] = {{.fd = supervisor->fd(), .events = POLLIN, .revents = 0},
                    {.fd = wake.get(), .events = POLLIN, .revents = 0}};
    // Three reasons to wake: a child's event, a caller (join with another grace, destruction), a deadline of
    // the supervisor.
    ::poll(fds, 2, supervisor->next_deadline().poll_timeout_ms());
    std::uint64_t count = 0;
    (void)!::read(wake.get(), &count, sizeof count);
    bool kill_now = false;
    {
      const base::MutexLock lock(mutex);
      supervisor->set_grace(grace);
      kill_now = std::exchange(kill, false);
    }
    if (kill_now) supervisor->kill();
    supervisor->step();
  }
}

SpawnError SpawnContext::State::describe(const ChildExit& exit) const {
  const std::string text = read_report(reports[static_cast<std::size_t>(exit.index)].get());
  Failure failure{.kind = ErrorKind::kPeerLost,
                  .message = base::cat("spawned process ", exit.index, " (pid ", exit.pid, ") ", exit.cause(),
                                       text.empty() ? "" : ": ", text),
                  .peer = LostPeer{exit.index, exit.pid, exit.cause()}};
  return SpawnError(std::move(failure), exit.index, exit.exit_code());
}

SpawnContext::SpawnContext(std::unique_ptr<State> state) : state_(std::move(state)) {}
SpawnContext::SpawnContext(SpawnContext&&) noexcept = default;
SpawnContext& SpawnContext::operator=(SpawnContext&&) noexcept = default;
SpawnContext::~SpawnContext() = default;

const std::vector<pid_t>& SpawnContext::pids() const {
  return state_->pids;
}

bool SpawnContext::join(std::optional<Milliseconds> timeout, Milliseconds grace) {
  {
    const base::MutexLock lock(state_->mutex);
    state_->grace = grace;
  }
  state_->poke();
  return join(timeout);
}

bool SpawnContext::join(std::optional<Milliseconds> timeout) {
  const Deadline deadline =
      timeout ? Deadline::after(base::checked_timeout(*timeout, "SpawnContext::join")) : Deadline::never();
  const base::MutexLock lock(state_->mutex);
  while (!state_->done) {
    if (deadline.expired()) return false;
    state_->changed.wait_until(state_->mutex, deadline.time_point());
  }
  if (state_->error) throw SpawnError(*state_->error);
  if (state_->broken) base::raise(*state_->broken);
  return true;
}

namespace {

// What the processes of one call need from this one before they exist.
struct Preparation {
  int n;
  int call;
  const std::function<void(int)>& fn;
  const JobServer& host;
  const std::vector<base::Fd>& reports;
  const base::LossNotes& notes;
  base::Fd empty_input{::open("/dev/null", O_RDONLY | O_CLOEXEC)};

  EnvironmentList environment_of(int index) const {
    const WorkerPlace place{.rank = index, .world_size = n, .local_rank = index, .local_world_size = n};
    EnvironmentList list = worker_environment(place, host.address());
    list.emplace_back(name_of(base::EnvVar::kLockstepNotes), notes.variable(index));
    return list;
  }

  ChildSpec fork_spec(int index) const {
    // Built here, so that the copy needs little of its own.
    auto body = [this, index, changes = environment_of(index)] {
      // A child that kept it open would keep the port taken after this process has ended.
      ::close(host.listen_fd());
      for (const auto& [name, value] : changes) ::setenv(name.c_str(), value.c_str(), 1);
      return internal::run_spawned(fn, index, reports[static_cast<std::size_t>(index)].get());
    };
    return {.body = std::move(body), .standard_input = empty_input.get()};
  }

  ChildSpec reexec_spec(int index) const {
    const int report = reports[static_cast<std::size_t>(index)].get();
    EnvironmentList changes = environment_of(index);
    changes.emplace_back(name_of(base::EnvVar::kLockstepSpawn), SpawnTarget{call, index, report}.text());
    ChildSpec spec{.argv = internal::own_arguments(),
                   .program = "/proc/self/exe",
                   .environment = environment_with(changes),
                   .standard_input = empty_input.get(),
                   .inherited = {report, notes.fd()}};
    if (const auto secret_fd = host.address().secret_fd) spec.inherited.push_back(*secret_fd);
    return spec;
  }
};

// A fork copies only the calling thread: locks that others hold would stay locked for ever in the child.
bool choose_fork(StartMethod method) {
  if (method == StartMethod::kReexec) return false;
  const int n_threads = internal::count_threads();
  if (n_threads == 1) return true;
  if (method == StartMethod::kAuto) return false;
  base::raise(ErrorKind::kUsage,
              base::cat("spawn by fork needs a process with a single thread, but this one has ", n_threads,
                        ": call it before anything starts threads (OpenMP included), or use "
                        "StartMethod::kReexec"));
}

}  // namespace

SpawnContext spawn(int n, const std::function<void(int index)>& fn, const SpawnOptions& options) {
  if (n < 1) base::raise(ErrorKind::kUsage, base::cat("spawn needs at least one process, not ", n));
  const int call = internal::count_spawn_call();
  auto state = std::make_unique<SpawnContext::State>(options.grace);
  // This process was executed anew to be one of the children of the call-th spawn(): main() ran again up to
  // here. Calls before that one return at once, as if their processes had ended; hence the rule that a
  // program reaches its spawn() calls in the same order each time.
  if (const auto target = SpawnTarget::from_environment()) {
    if (target->call == call) internal::become_spawned(fn, *target);
    const base::MutexLock lock(state->mutex);
    state->done = true;  // an earlier call of a program that was started anew for a later one
    return SpawnContext(std::move(state));
  }
  const bool fork = choose_fork(options.start_method);
  if (!fork && internal::inside_spawned()) {
    base::raise(
        ErrorKind::kUsage,
        "a spawned process cannot execute its program again: spawn there with StartMethod::kFork, before "
        "threads start");
  }
  state->host.emplace(JobServer::open());
  for (int i = 0; i < n; ++i) state->reports.push_back(make_report());

  state->notes.emplace(n);

  const Preparation preparation{n, call, fn, *state->host, state->reports, *state->notes};
  std::vector<ChildSpec> specs;
  for (int i = 0; i < n; ++i) specs.push_back(fork ? preparation.fork_spec(i) : preparation.reexec_spec(i));
  ProcessTree tree = ProcessTree::start(specs);
  state->pids = tree.pids();
  state->supervisor.emplace(
      std::move(tree),
      SupervisorOptions{
          .grace = options.grace,
          .on_exit = [host = &*state->host](const ChildExit& exit) { host->publish_exit(exit.index, exit); },
          .notes = &*state->notes});
  {
    // Signals are for the program's own threads: those started here inherit a mask that blocks them.
    const internal::SignalsBlocked blocked;
    state->host->serve();
    state->watcher = base::Thread("ls-spawn-watch", [state = state.get()] { state->watch(); });
  }
  SpawnContext context(std::move(state));
  if (options.join == SpawnJoin::kYes) context.join();
  return context;
}

}  // namespace lockstep
