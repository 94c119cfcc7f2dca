#include "tests/cuda/gpu_here.h"

#include <sys/wait.h>
#include <unistd.h>

#include "engines/cuda/driver.h"

namespace lockstep::cuda {
namespace {

std::string why_not() {
  std::string why;
  const Driver* const driver = Driver::find(&why);
  int n = 0;
  if (driver == nullptr) {
    return why.find("libcuda.so.1: cannot open shared object file") != std::string::npos
               ? "no CUDA driver on this machine (libcuda.so.1 not found)"
               : "no usable CUDA driver on this machine: " + why;
  }
  const Result result = driver->device_get_count(&n);
  return result == kSuccess && n > 0 ? "" : "no usable CUDA driver on this machine: no device";
}

}  // namespace

std::string why_no_gpu() {
  int ends[2];
  if (::pipe(ends) != 0) return "no usable CUDA driver on this machine: pipe failed";
  const pid_t pid = ::fork();
  if (pid == 0) {
    const std::string why = why_not();
    const bool told = ::write(ends[1], why.data(), why.size()) == static_cast<ssize_t>(why.size());
    ::_exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  std::string text;
  char part[256];
  for (ssize_t n = 0; (n = ::read(ends[0], part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(n));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status == 0 ? text : "no usable CUDA driver on this machine: it ended the process that asked";
}

}  // namespace lockstep::cuda
