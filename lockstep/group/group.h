// Process groups: the tensor band's floor. Read in this order: world.h (enter and leave), process_group.h (what a
// group is), groups.h (groups of some ranks), collectives.h and point_to_point.h (what it does), work.h (an operation in
// flight), coalescing.h (many as one). On top: objects.h (C++ values), functional.h (out of place, waited for on first
// use), differentiable.h (for autograd), device_mesh.h (ranks in an array with a group per dimension). backends.h says
// which engine works for which device, debug.h who is out of step.
#pragma once

#include "lockstep/group/backends.h"
#include "lockstep/group/coalescing.h"
#include "lockstep/group/collectives.h"
#include "lockstep/group/debug.h"
#include "lockstep/group/device_mesh.h"
#include "lockstep/group/differentiable.h"
#include "lockstep/group/functional.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/objects.h"
#include "lockstep/group/point_to_point.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/reduce_op.h"
#include "lockstep/group/work.h"
#include "lockstep/group/world.h"
