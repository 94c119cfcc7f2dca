// Watches the processes of the other ranks and reports each that is lost. The kernel tells: a pidfd becomes readable
// when the process ends, and its lifeline hangs up when it ends or becomes another program (exec). One alone does not do: a
// pidfd lives through exec, and a child that the process forked keeps the lifeline open.
// Thread: one, "ls-watch", started only when there are other processes; joined by the destructor.
#pragma once

#include <cstdint>
#include <functional>

#include "lockstep/base/fd.h"
#include "lockstep/base/thread.h"
#include "lockstep/host/internal/fabric.h"

namespace lockstep::comm::internal {

class Watch {
 public:
  enum class Loss : std::uint8_t { kEnded, kExec };
  // Runs on the watching thread, once per rank.
  using OnLost = std::function<void(int rank, Loss loss)>;
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
