// Blocks every signal in the calling thread for a scope. Threads and processes started in it inherit the
// mask: the program's handlers must not run there.
#pragma once

#include <signal.h>

namespace lockstep::internal {

class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  const sigset_t& before() const { return before_; }

 private:
  sigset_t before_{};
};

}  // namespace lockstep::internal
