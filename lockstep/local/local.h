// What processes of one host share, below the engine and the courier: memory, and whether the other is still there.
//
//   segment_table.h  each segment of this process mapped once
#pragma once

#include "lockstep/local/segment_table.h"
