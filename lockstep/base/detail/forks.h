// Detects whether an object was created in this process or inherited through fork. A forked child has its
// parent's connections, with their stream and ring positions and the sequence numbers of their encrypted
// records, but none of its threads: it must neither send nor receive on them.
//
// A counter instead of getpid(), since every call checks it. Thread safety: any thread.
#pragma once

namespace lockstep::base {

// Incremented in every forked child. vfork and a bare clone() are not detected.
unsigned n_forks() noexcept;

// Records the process it was created in; a copy keeps the original's.
class MadeHere {
 public:
  MadeHere() noexcept : forks_(n_forks()) {}
  // False in a forked child.
  explicit operator bool() const noexcept { return forks_ == n_forks(); }

 private:
  unsigned forks_;
};

}  // namespace lockstep::base
