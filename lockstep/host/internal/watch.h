// Watches the processes of the other ranks and reports each that ends. The kernel tells:
// a pidfd becomes readable, or where it cannot be had, the local socket hangs up.
// Thread: one, "ls-watch", started only when there are other processes; joined by the destructor.
#pragma once

#include <functional>

#include "lockstep/base/fd.h"
#include "lockstep/base/thread.h"
#include "lockstep/host/internal/fabric.h"

namespace lockstep::comm::internal {

class Watch {
 public:
  // `on_lost(rank)` runs on the watching thread, once per rank.
  using OnLost = std::function<void(int rank)>;
  Watch(Fabric& fabric, OnLost on_lost);
  ~Watch();

 private:
  void watch();

  Fabric& fabric_;
  const OnLost on_lost_;
  Fd stop_;  // eventfd
  Thread thread_;
};

}  // namespace lockstep::comm::internal
