// Watches processes of other ranks and reports each that is lost, whether somebody waits for it just then or not.
// Thread: one, "ls-peer-watch", started only when there is somebody to watch; joined by the destructor.
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
    int rank = -1;
    const PeerProcess* process = nullptr;  // outlives the watch; one that cannot be told is skipped
  };

  // Raises kResource when there is no descriptor or thread to be had.
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
