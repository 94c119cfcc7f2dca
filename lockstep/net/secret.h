// The job secret: 32 random bytes known only to the processes of one job. Both ends of a connection prove
// that they know it (handshake.h); it is never sent or printed, and each copy is wiped from memory when
// destroyed.
//
// Ranks get it from the launcher in an inherited descriptor (LOCKSTEP_SECRET_FD) or from a file that only its
// owner can read (LOCKSTEP_SECRET_FILE); both hold 64 hexadecimal digits. Thread safety: a value; distinct
// copies may be used from distinct threads.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/detail/fd.h"

namespace lockstep {

class JobSecret {
 public:
  static constexpr std::size_t kBytes = 32;

  // From the system's random generator.
  static JobSecret mint();
  // Raises kUsage when the file is missing, is not a plain file of this user with mode 0600 or 0400, or does
  // not hold 64 hexadecimal digits; the message shows the shell command that creates a valid one.
  static JobSecret from_file(const std::string& path);
  // Reads from the start of `fd` without moving its offset and without closing it, so any number of ranks can
  // share one open file description. `fd` must be seekable: a memfd or a file.
  static JobSecret from_fd(int fd);
  // From 64 hexadecimal digits, for keys that live only as long as one rendezvous. Raises kUsage naming the
  // source.
  static JobSecret from_digits(std::string_view text, const std::string& source);
  // LOCKSTEP_SECRET_FD when set, else LOCKSTEP_SECRET_FILE, else nothing.
  static std::optional<JobSecret> from_environment();
  // The shell command that creates a secret file.
  static std::string make_file_hint(const std::string& path);

  // A sealed memfd with the secret, for from_fd in a child. Close-on-exec; cleared by the code that starts
  // the child.
  base::Fd to_memfd() const;
  // Creates `path` with mode 0600; raises kSystem when it exists.
  void write_file(const std::string& path) const;

  std::span<const std::uint8_t> bytes() const { return bytes_; }
  // In constant time.
  friend bool operator==(const JobSecret& a, const JobSecret& b) noexcept;

  JobSecret(const JobSecret&) = default;
  JobSecret& operator=(const JobSecret&) = default;
  ~JobSecret();

 private:
  JobSecret() = default;

  std::array<std::uint8_t, kBytes> bytes_{};
};

}  // namespace lockstep
