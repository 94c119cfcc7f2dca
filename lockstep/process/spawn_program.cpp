// Programs that spawn, for spawn_test: each case is a main() of its own, since a re-executed child runs it
// again.
//
//   spawn_program <fork|reexec|auto> <case> [folder]
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/process/job_server.h"
#include "lockstep/process/spawn.h"
#include "lockstep/store/tcp_store.h"

namespace {

using namespace lockstep;

std::string g_folder;

std::unique_ptr<TcpStore> join_world() {
  auto store = TcpStore::open(
      base::environment(base::EnvVar::kMasterAddr).value(),
      {.port = static_cast<std::uint16_t>(base::environment_int(base::EnvVar::kMasterPort).value()),
       .timeout = Milliseconds(60'000),
       .secret = JobSecret::from_environment()});
  const std::string all = "all";
  if (store->add("here", 1) == base::environment_int(base::EnvVar::kWorldSize)) store->set(all, "");
  store->wait({&all, 1});
  return store;
}

void say(const std::string& line) {
  // One write, so that lines of several processes do not mix.
  const std::string text = line + "\n";
  (void)!::write(1, text.data(), text.size());
}

void write_pid(const std::string& name, pid_t pid) {
  std::ofstream(g_folder + "/" + name) << pid << std::endl;
}

void meet(SpawnOptions options) {
  spawn(
      3,
      [](int index) {
        join_world();
        say(base::cat(index, " is rank ", base::environment(base::EnvVar::kRank).value(), " of ",
                      base::environment(base::EnvVar::kWorldSize).value()));
      },
      options);
  say("joined");
}

// Two calls: a child of the second must not run the first again.
void twice(SpawnOptions options) {
  spawn(
      2, [](int index) { say(base::cat("first ", index)); }, options);
  spawn(
      2, [](int index) { say(base::cat("second ", index)); }, options);
}

void throws(SpawnOptions options) {
  try {
    spawn(
        2,
        [](int index) {
          join_world();
          if (index == 1) throw std::runtime_error("bad weights");
          ::pause();
        },
        options);
  } catch (const SpawnError& error) {
    say(base::cat("index ", error.index(), " code ", error.exit_code(), " pid ", error.peer()->pid > 0, " ",
                  error.what()));
  }
}

// Index 0 loses index 1 before that one has failed.
void blames(SpawnOptions options) {
  try {
    spawn(
        2,
        [](int index) {
          const auto store = join_world();
          if (index == 0) base::raise(ErrorKind::kPeerLost, "rank 1 left the group");
          store->get(process::exit_cause_key(0));
          throw std::runtime_error("bad weights");
        },
        options);
  } catch (const SpawnError& error) {
    say(base::cat("index ", error.index(), " ", error.what()));
  }
}

// The survivor ignores SIGTERM and asks the store what became of the other.
void killed(SpawnOptions options) {
  try {
    spawn(
        2,
        [](int index) {
          if (index == 0) ::signal(SIGTERM, SIG_IGN);
          const auto store = join_world();
          if (index == 1) ::raise(SIGKILL);
          say("1 " + to_text(store->get(process::exit_cause_key(1))));
        },
        options);
  } catch (const SpawnError& error) {
    say(error.peer()->cause);
  }
}

void stubborn(SpawnOptions options) {
  options.grace = Milliseconds(100);
  try {
    spawn(
        2,
        [](int index) {
          if (index == 0) ::signal(SIGTERM, SIG_IGN);
          join_world();
          if (index == 1) ::_exit(4);
          for (;;) ::pause();
        },
        options);
  } catch (const SpawnError& error) {
    say(base::cat(error.index(), " ", error.peer()->cause));
  }
}

void wait_then_join(SpawnOptions options) {
  options.join = SpawnJoin::kNo;
  SpawnContext context = spawn(
      2,
      [](int) {
        const auto store = join_world();
        store->get("go");
      },
      options);
  say(base::cat("pids ", context.pids().size(), " ended ", context.join(Milliseconds(50))));
  try {
    context.join(Milliseconds(0));
  } catch (const Error& error) {
    say(error.kind() == ErrorKind::kUsage ? "zero is no timeout" : error.what());
  }
  // Destruction ends them; nobody ever says "go".
}

void forever(SpawnOptions options) {
  spawn(
      2,
      [](int index) {
        write_pid(base::cat("child", index), ::getpid());
        const std::string script = "echo $$ > " + g_folder + "/grandchild" + std::to_string(index) +
                                   "; while :; do sleep 1000; done";
        if (::fork() == 0) {
          ::setsid();
          ::execl("/bin/sh", "sh", "-c", script.c_str(), nullptr);
        }
        for (;;) ::pause();
      },
      options);
}

void with_threads(SpawnOptions options) {
  std::thread other([] { ::usleep(50); });
  std::thread sleeper([] { ::pause(); });
  other.join();
  try {
    spawn(
        1, [](int index) { say(base::cat("ran ", index)); }, options);
  } catch (const Error& error) {
    say(base::cat(to_string(error.kind()), ": ", error.what()));
  }
  std::cout.flush();
  ::_exit(0);  // the sleeper sleeps on
}

void nested(SpawnOptions options) {
  spawn(
      2,
      [options](int outer) {
        spawn(
            2, [outer](int inner) { say(base::cat(outer, " ", inner)); }, options);
      },
      options);
}

void from_a_thread(SpawnOptions options) {
  // A thread that ends must not take the processes it started with it.
  options.join = SpawnJoin::kNo;
  std::unique_ptr<SpawnContext> context;
  std::thread starter([&] {
    context = std::make_unique<SpawnContext>(spawn(
        2,
        [](int index) {
          join_world();
          ::usleep(50'000);
          say(base::cat("done ", index));
        },
        options));
  });
  starter.join();
  if (context) say(base::cat("ended ", context->join()));
}

void reads_input(SpawnOptions options) {
  spawn(
      1, [](int) { say(base::cat("end of input ", std::getchar() == EOF)); }, options);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::map<std::string, StartMethod> methods = {
      {"fork", StartMethod::kFork}, {"reexec", StartMethod::kReexec}, {"auto", StartMethod::kAuto}};
  const std::map<std::string, void (*)(SpawnOptions)> cases = {{"meet", meet},
                                                               {"twice", twice},
                                                               {"throws", throws},
                                                               {"blames", blames},
                                                               {"killed", killed},
                                                               {"stubborn", stubborn},
                                                               {"wait_then_join", wait_then_join},
                                                               {"forever", forever},
                                                               {"with_threads", with_threads},
                                                               {"nested", nested},
                                                               {"from_a_thread", from_a_thread},
                                                               {"reads_input", reads_input}};
  if (argc > 3) g_folder = argv[3];
  try {
    cases.at(argv[2])({.start_method = methods.at(argv[1])});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
