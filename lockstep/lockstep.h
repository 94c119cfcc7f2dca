// Everything a training program needs: #include <lockstep/lockstep.h>.
#pragma once

#include "lockstep/autograd/autograd.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/ddp/replicate.h"
#include "lockstep/group/group.h"
#include "lockstep/group/run_main.h"
#include "lockstep/join/join.h"
#include "lockstep/nn/nn.h"
#include "lockstep/optim/optim.h"
#include "lockstep/process/spawn.h"
#include "lockstep/remote/remote.h"
#include "lockstep/rendezvous/rendezvous.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/store/store.h"
