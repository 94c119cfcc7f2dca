// Information from the kernel about processes and hosts. Thread safety: any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/detail/fd.h"

namespace lockstep::base {

// "exited with code 3", "killed by SIGKILL (9)", from a wait(2) status.
std::string describe_wait_status(int status);
// "SIGSEGV" for 11; "signal 77" for unknown numbers.
std::string signal_name(int signal);

// A descriptor that becomes readable when the process exits. Empty when the process no longer exists, is not
// visible, or the kernel does not support pidfds.
Fd open_pidfd(pid_t pid);

// How the process behind a pidfd ended, as text, if the kernel reports it (PIDFD_GET_INFO, Linux 6.15 and
// later).
std::optional<std::string> exit_cause(int pidfd);

// Two processes with equal identities can share memory and abstract sockets: same boot of the same kernel,
// same network namespace.
std::string host_identity();

// Random hexadecimal text of `n_bytes` bytes from the kernel's generator.
std::string random_hex(int n_bytes);

// Cores this process may run on.
int available_cores();

}  // namespace lockstep::base
