// Watches processes of other ranks and reports each that is lost, whether or not a thread waits for it at
// that moment.
// Thread: one, "ls-peer-watch", started only when there is a process to watch; joined by the destructor.
// Thread safety: may be created and destroyed on any thread but the watching one; it has no other methods.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/local/peer_process.h"

namespace lockstep::local {

class DeathWatch {
 public:
  enum class Loss : std::uint8_t {
    kEnded,
    kExec,  // it became another program, or closed its descriptors
  };
  // Runs on the watching thread, once per rank; holds no lock.
  using OnLost = std::function<void(int rank, Loss loss)>;
  struct Watched {
    int rank = 0;
    const PeerProcess* process = nullptr;  // outlives the watch; skipped when its end cannot be observed
  };

  // Raises kResource when there is no descriptor or thread left.
  DeathWatch(std::vector<Watched> processes, OnLost on_lost);
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

 private:
  void watch();

  const OnLost on_lost_;
  std::vector<Watched> processes_;
  base::Fd stop_;  // eventfd
  base::Thread thread_;
};

}  // namespace lockstep::local
