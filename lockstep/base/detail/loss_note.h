// A rank that fails because it lost a peer is not the root cause. Before it raises kPeerLost it writes a note
// that its starter and the other ranks on its host can read after it has died, by whatever means: uncaught
// exception, exit code, signal.
//
// The notes of one starter (launcher or spawn) are stored in a memfd that its workers inherit: one slot per
// worker, holding the message of the last kPeerLost the worker raised. LOCKSTEP_NOTES gives a worker the
// descriptor and its slot.
//
// Thread safety: every function may be called from any thread. Without a starter they do nothing.
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
  // The worker's last note; nothing when it lost no peer.
  std::optional<std::string> read(int worker) const;

 private:
  Fd table_;
};

// The worker's side, called by raise(): stores `message`, truncated to a few hundred bytes. Never blocks.
void note_loss(std::string_view message) noexcept;

// The note of a process on this host with the same starter; "" when it wrote none.
std::string loss_noted_by(pid_t pid) noexcept;

}  // namespace lockstep::base
