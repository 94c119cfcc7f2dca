// Process groups: the tensor band's floor. Read in this order: world.h (enter and leave), process_group.h (what a
// group is), groups.h (groups of some ranks), work.h (an operation in flight), backends.h (which engine works for which
// device), monitored_barrier.h (who is missing). What a group does is in collective/, groups in an array in mesh/.
#pragma once

#include "lockstep/group/backends.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/monitored_barrier.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"
#include "lockstep/group/world.h"
