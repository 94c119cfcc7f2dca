// Runs the launcher as a process of its own, for its tests. Output goes to files, so nothing can block; every
// wait is bounded.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "lockstep/base/path_testing.h"
#include "lockstep/process/testing.h"
#include "lockstep/process/worker_environment.h"

namespace lockstep::launch {

inline const std::string kLauncher = path_testing::from_program(LOCKSTEP_LAUNCHER_PATH);
inline const std::string kTestWorker = path_testing::from_program(LOCKSTEP_TEST_WORKER);

class Launcher {
 public:
  struct Options {
    process::EnvironmentList environment{};
    std::string input{};
    rlim_t open_files = 0;       // the soft limit it starts with; 0: this process's
    std::vector<int> ignored{};  // signals it inherits as ignored
  };

  explicit Launcher(const std::vector<std::string>& arguments) : Launcher(arguments, Options{}) {}
  Launcher(const std::vector<std::string>& arguments, const Options& options) {
    std::ofstream(folder_.file("in")) << options.input;
    std::vector<std::string> argv = {kLauncher};
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    const auto environment = process::environment_with(options.environment);
    auto argv_pointers = pointers(argv);
    auto environment_pointers = pointers(environment);
    const std::string in = folder_.file("in");
    const std::string out = folder_.file("out");
    const std::string err = folder_.file("err");
    pid_ = ::fork();
    if (pid_ != 0) return;
    for (const int signal : options.ignored) ::signal(signal, SIG_IGN);
    if (rlimit limit{}; options.open_files > 0 && ::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
      limit.rlim_cur = options.open_files;
      ::setrlimit(RLIMIT_NOFILE, &limit);
    }
    redirect(in, O_RDONLY, 0);
    redirect(out, O_WRONLY | O_CREAT, 1);
    redirect(err, O_WRONLY | O_CREAT, 2);
    ::execve(argv_pointers[0], argv_pointers.data(), environment_pointers.data());
    ::_exit(126);
  }
  ~Launcher() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  pid_t pid() const { return pid_; }
  void kill(int signal) const { ::kill(pid_, signal); }
  // The shell's exit code; -1 when it did not end.
  int wait() {
    int status = -1;
    const bool ended = process_testing::eventually([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; });
    if (!ended) return -1;
    pid_ = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  std::string out() const { return process_testing::read_file(folder_.file("out")); }
  std::string err() const { return process_testing::read_file(folder_.file("err")); }

 private:
  static void redirect(const std::string& path, int flags, int target) {
    const int fd = ::open(path.c_str(), flags, 0600);
    if (fd < 0 || ::dup2(fd, target) < 0) ::_exit(126);
    if (fd != target) ::close(fd);
  }
  static std::vector<char*> pointers(const std::vector<std::string>& texts) {
    std::vector<char*> list;
    for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
    list.push_back(nullptr);
    return list;
  }

  process_testing::TemporaryFolder folder_;
  pid_t pid_ = -1;
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace lockstep::launch
