// Whether this process is the one in which something was made, or a copy of it. A forked child has its parent's connections,
// with their places in streams and rings and the numbers of their encrypted records, but none of its threads: it must not say a
// word there, nor take one.
//
// A counter and not the pid, since it is asked for by every call. Thread safety: everything.
#pragma once

namespace lockstep::base {

// Grows in every forked child. Children of vfork and of a bare clone() are not seen.
unsigned n_forks() noexcept;

// Remembers where it was made; a copy, where it was copied from.
class MadeHere {
 public:
  MadeHere() noexcept : forks_(n_forks()) {}
  // False in a forked child.
  explicit operator bool() const noexcept { return forks_ == n_forks(); }

 private:
  unsigned forks_;
};

}  // namespace lockstep::base
