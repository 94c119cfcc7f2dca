// Signals and the threads of a library: ours take none, and gloo's writes raise none.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <ctime>

namespace lockstep::gloo_plugin {

// gloo writes to sockets in a way that raises SIGPIPE when the other end has gone, which ends a program that
// does not expect it. Held while a thread of the program may do so. A signal that came is taken back.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    const sigset_t pipe = only_sigpipe();
    ::pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~NoSigpipe() {
    const sigset_t pipe = only_sigpipe();
    const timespec now{};
    if (!was_pending_) ::sigtimedwait(&pipe, nullptr, &now);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;

 private:
  static sigset_t only_sigpipe() {
    sigset_t pipe;
    ::sigemptyset(&pipe);
    ::sigaddset(&pipe, SIGPIPE);
    return pipe;
  }
  sigset_t before_{};
  bool was_pending_ = false;
};

// Threads started while it is held get no signals, SIGPIPE among them: those are for the program's own.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace lockstep::gloo_plugin
