// A rank that fails because it lost another is not the root cause. Before it raises kPeerLost it leaves a note where
// its starter and the ranks of its host can read it after its death, however it dies: uncaught exception, exit code,
// signal.
//
// The notes of one starter (launcher or spawn) lie in a memfd that its workers inherit: a slot per worker, with the
// text of the last kPeerLost that the worker raised. LOCKSTEP_NOTES tells a worker the descriptor and its slot.
//
// Thread safety: every function may be called from any thread. Without a starter all of it does nothing.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/detail/fd.h"

namespace lockstep::base {

// The starter's side.
class LossNotes {
 public:
  // Slots for `n` workers. Raises kResource when there is no descriptor or memory left.
  explicit LossNotes(int n);

  // Close-on-exec; workers must inherit it.
  int fd() const { return table_.get(); }
  // The value of LOCKSTEP_NOTES for one worker.
  std::string variable(int worker) const;
  // What the worker wrote last; nothing when it lost no peer.
  std::optional<std::string> read(int worker) const;

 private:
  Fd table_;
};

// The worker's side, called by raise(): keeps `message`, cut to some hundred bytes. Never throws, never blocks.
void note_loss(std::string_view message) noexcept;

// What a process of this host that had the same starter noted; "" when it noted nothing.
std::string loss_noted_by(pid_t pid) noexcept;

}  // namespace lockstep::base
