// Process groups: the lowest layer of the tensor band. Read in this order: world.h (enter and leave),
// process_group.h (what a group is), groups.h (groups of some ranks), work.h (an operation in flight),
// backends.h (which engine serves which device), monitored_barrier.h (which rank is missing). The operations
// of a group are in collective/, arrays of groups in mesh/.
// Thread safety: stated in each header.
#pragma once

#include "lockstep/group/backends.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/monitored_barrier.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"
#include "lockstep/group/world.h"
