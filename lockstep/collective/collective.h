// The operations that the ranks of a group perform together. Read in this order: collectives.h and
// point_to_point.h (tensors, in place), reduce_op.h, coalescing.h (many as one), objects.h (C++ values),
// functional.h (out of place, waited for on first use), differentiable.h (for autograd). collective_utils.h
// and breakpoint.h help to find out where ranks differ.
// Thread safety: stated in each header.
#pragma once

#include "lockstep/collective/coalescing.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/collective/differentiable.h"
#include "lockstep/collective/functional.h"
#include "lockstep/collective/objects.h"
#include "lockstep/collective/point_to_point.h"
#include "lockstep/collective/record_comm.h"
#include "lockstep/collective/reduce_op.h"
#include "lockstep/group/group.h"
