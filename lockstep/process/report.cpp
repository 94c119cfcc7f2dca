#include "lockstep/process/report.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::process {

base::Fd make_report() {
  base::Fd report(::memfd_create("lockstep-report", MFD_CLOEXEC));
  if (!report) base::raise(base::system_failure(errno, "memfd_create for a process's report"));
  return report;
}

std::string read_report(int report) {
  std::string text(kMaxReport, '\0');
  const ssize_t n = ::pread(report, text.data(), text.size(), 0);
  text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return text;
}

void write_report(int report, std::string_view text) noexcept {
  if (::ftruncate(report, 0) != 0) return;
  (void)!::pwrite(report, text.data(), std::min(text.size(), kMaxReport), 0);
}

}  // namespace lockstep::process
