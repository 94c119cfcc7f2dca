// The floor of lockstep: what every folder above may use. Torch-free, no dependency of ours below it.
//
//   error.h        one exception family, eight kinds; Failure is the copyable value behind it
//   deadline.h     an absolute point in time, handed down unchanged through every blocking call
//   bytes.h        byte strings, and a bounded reader and writer over them
//   log.h          leveled log lines on stderr
//   loss_note.h    a rank that fails because of another says so to its starter
//   environment.h  every environment variable lockstep reads, with its meaning: one table
//   fd.h           an owned file descriptor
//   process.h      pidfds, exit causes in words, host identity
//   stack_trace.h  the C++ stack as text, for errors
//   text.h         cat(): string building without fmt in headers
//   thread.h       a named, joined thread
#pragma once

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/log.h"
#include "lockstep/base/loss_note.h"
#include "lockstep/base/process.h"
#include "lockstep/base/stack_trace.h"
#include "lockstep/base/text.h"
#include "lockstep/base/thread.h"
