// A signal for those who handle it. SIGUSR1 and SIGUSR2 end a process that does not: a shell between the launcher and
// the program, a helper the program started. Such a process is left alone.
#pragma once

#include <sys/types.h>

#include <span>

namespace lockstep {

// Sends `signal` to every process of the sessions that has a handler for it, and returns how many those are. One that
// blocks it to take it from a signalfd has none: shells block signals for moments, which looks the same. Processes that a worker moved to a session of their own are not found. Never throws.
int send_handled_signal(std::span<const pid_t> sessions, int signal) noexcept;

}  // namespace lockstep
