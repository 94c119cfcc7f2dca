// What processes of one host share, below the engine and the transport: memory, and whether a peer is still
// alive.
//
//   meeting.h        ranks of one host find each other, once
//   segment_table.h  each segment of this process mapped once
//   page_heap.h      extents of a sparse segment, for its creator
//   wake.h           bells: sleeping and waking across processes
//   peer_process.h   whether a process still runs this program, and how it ended
//   death_watch.h    a thread that reports each process that is lost
// Thread safety: as stated in each header that it includes.
#pragma once

#include "lockstep/local/death_watch.h"
#include "lockstep/local/meeting.h"
#include "lockstep/local/page_heap.h"
#include "lockstep/local/peer_process.h"
#include "lockstep/local/segment_table.h"
#include "lockstep/local/wake.h"
