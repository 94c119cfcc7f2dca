#include "lockstep/net/secret.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string_view>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep {

namespace {

constexpr std::size_t kDigits = 2 * JobSecret::kBytes;

// Text of a secret on its way in or out; wiped.
struct HexText {
  // Room for a line end and one byte more: a longer text fills it and is refused by its length.
  std::array<char, kDigits + 2> text{};
  ~HexText() { OPENSSL_cleanse(text.data(), text.size()); }
};

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

void write_digits(int fd, std::span<const std::uint8_t> bytes, const std::string& what) {
  HexText out;
  constexpr char kHex[] = "0123456789abcdef";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    out.text[2 * i] = kHex[bytes[i] >> 4];
    out.text[2 * i + 1] = kHex[bytes[i] & 15];
  }
  out.text[kDigits] = '\n';
  const ssize_t n = ::write(fd, out.text.data(), kDigits + 1);
  if (n != static_cast<ssize_t>(kDigits + 1))
    base::raise(base::system_failure(n < 0 ? errno : ENOSPC, base::cat("write ", what)));
}

}  // namespace

JobSecret::~JobSecret() {
  OPENSSL_cleanse(bytes_.data(), bytes_.size());
}

// In constant time: how long a comparison takes must not tell how much of a guess was right.
bool operator==(const JobSecret& a, const JobSecret& b) noexcept {
  return CRYPTO_memcmp(a.bytes_.data(), b.bytes_.data(), JobSecret::kBytes) == 0;
}

JobSecret JobSecret::mint() {
  JobSecret secret;
  if (RAND_priv_bytes(secret.bytes_.data(), static_cast<int>(kBytes)) != 1) {
    base::raise(ErrorKind::kSystem, "the random generator returned no bytes for a job secret");
  }
  return secret;
}

JobSecret JobSecret::from_digits(std::string_view text, const std::string& source) {
  // What editors and `echo` append.
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
  JobSecret secret;
  bool good = text.size() == kDigits;
  for (std::size_t i = 0; good && i < kBytes; ++i) {
    const int high = hex_value(text[2 * i]);
    const int low = hex_value(text[2 * i + 1]);
    good = high >= 0 && low >= 0;
    secret.bytes_[i] = static_cast<std::uint8_t>(high << 4 | low);
  }
  if (!good)
    base::raise(ErrorKind::kUsage, base::cat(source, " does not hold a job secret (64 hexadecimal digits)"));
  return secret;
}

std::string JobSecret::make_file_hint(const std::string& path) {
  return base::cat("make one with:  (umask 077; od -An -vN32 -tx1 /dev/urandom | tr -d ' \\n' > '", path,
                   "')");
}

JobSecret JobSecret::from_file(const std::string& path) {
  const auto refuse = [&](std::string_view why) {
    base::raise(ErrorKind::kUsage, base::cat("secret file ", path, ": ", why, "; ", make_file_hint(path)));
  };
  // Not blocking: the path may name a pipe.
  const base::Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file) refuse(base::system_failure(errno, "open").message);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) refuse(base::system_failure(errno, "stat").message);
  if (!S_ISREG(info.st_mode)) refuse("not a plain file");
  // Checked on the descriptor, after open(): the path could be given to another file in between.
  if (info.st_uid != ::geteuid())
    refuse(base::cat("belongs to user ", info.st_uid, ", not to user ", ::geteuid()));
  const mode_t mode = info.st_mode & 07777;
  if (mode != 0600 && mode != 0400) {
    char octal[8];
    std::snprintf(octal, sizeof octal, "%04o", static_cast<unsigned>(mode));
    refuse(base::cat("mode ", octal, " lets others read it; chmod 600 it, or"));
  }
  try {
    return from_fd(file.get());
  } catch (const Error& error) {
    refuse(error.what());
    throw;
  }
}

JobSecret JobSecret::from_fd(int fd) {
  HexText in;
  std::size_t have = 0;
  while (have < in.text.size()) {
    // From the beginning and without moving the offset: the descriptor is shared with every process that
    // inherited it, and several may read it at once.
    const ssize_t n = ::pread(fd, in.text.data() + have, in.text.size() - have, static_cast<off_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      base::raise(ErrorKind::kUsage,
                  base::system_failure(errno, base::cat("read the job secret from descriptor ", fd)).message);
    }
    if (n == 0) break;
    have += static_cast<std::size_t>(n);
  }
  return from_digits({in.text.data(), have}, base::cat("descriptor ", fd));
}

// The descriptor wins: a launcher that passes one has made the secret for this job.
std::optional<JobSecret> JobSecret::from_environment() {
  if (const auto fd = base::environment_int(base::EnvVar::kLockstepSecretFd))
    return from_fd(static_cast<int>(*fd));
  if (const auto path = base::environment(base::EnvVar::kLockstepSecretFile)) return from_file(*path);
  return std::nullopt;
}

// A descriptor rather than a variable or an argument: the environment and the command line of a process can
// be read by others of the same user for as long as it runs, and are inherited by everything it starts.
base::Fd JobSecret::to_memfd() const {
  base::Fd fd(::memfd_create("lockstep-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) base::raise(base::system_failure(errno, "memfd_create for the job secret"));
  write_digits(fd.get(), bytes_, "the job secret");
  // The workers inherit the descriptor with write access; none of them can change what the others read.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    base::raise(base::system_failure(errno, "seal the job secret"));
  }
  return fd;
}

// O_EXCL: a file that somebody put there before could have other permissions, or be a link.
void JobSecret::write_file(const std::string& path) const {
  const base::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) base::raise(base::system_failure(errno, base::cat("create secret file ", path)));
  write_digits(file.get(), bytes_, path);
}

}  // namespace lockstep
