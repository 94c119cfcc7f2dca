// The algorithms. In each the ranks first exchange their calls, with the payload when it is small; only when
// all calls belong together does data move. Every rank sends straight to those that need the bytes: a rank
// that waits always waits for the one that is late, and can name it.
//
// Reductions: each rank reduces one slice of the vector, inputs in the order of ranks, and hands out the
// result; so all ranks get the same bits, in chunks that overlap sending, arithmetic and receiving.
#pragma once

#include <memory>
#include <vector>

#include "engines/gloo/mailbox.h"
#include "engines/gloo/operation.h"

namespace lockstep::gloo_plugin {

// What a collective needs of its communicator.
struct Session {
  int rank, size;
  StopSource& stop_source;
  Mailbox& mailbox;
  Connections& connections;  // for data
};

// Runs it to its end. Pre: the operation was checked; operation.call is set. Raises Error (also when the
// ranks' calls do not belong together: LOCKSTEP_USAGE) or PairFailed.
void run_collective(Session& session, Operation& operation);

}  // namespace lockstep::gloo_plugin
