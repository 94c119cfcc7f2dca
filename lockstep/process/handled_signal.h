// Forwards a signal only to processes that handle it. SIGUSR1 and SIGUSR2 terminate a process without a
// handler, such as a shell between the launcher and the program, or a helper the program started. Such a
// process is skipped. Thread safety: any thread.
#pragma once

#include <sys/types.h>

#include <span>

namespace lockstep::process {

// Sends `signal` to every process of the sessions that has a handler for it, and returns their number. A
// process that blocks it to read it from a signalfd counts as having none: shells block signals briefly,
// which looks the same. Processes that a worker moved to another session are not found.
int send_handled_signal(std::span<const pid_t> sessions, int signal) noexcept;

}  // namespace lockstep::process
