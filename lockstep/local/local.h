// What processes of one host share, below the engine and the transport: memory, and whether the other is still there.
//
//   meeting.h        ranks of one host get to know each other, once
//   segment_table.h  each segment of this process mapped once
//   page_heap.h      extents of a sparse segment, for its maker
//   wake.h           bells: sleeping and waking across processes
//   peer_process.h   whether a process still runs this program, and how it ended
//   death_watch.h    a thread that reports each process that is lost
#pragma once

#include "lockstep/local/death_watch.h"
#include "lockstep/local/meeting.h"
#include "lockstep/local/page_heap.h"
#include "lockstep/local/peer_process.h"
#include "lockstep/local/segment_table.h"
#include "lockstep/local/wake.h"
