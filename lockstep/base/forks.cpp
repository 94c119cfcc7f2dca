#include "lockstep/base/detail/forks.h"

#include <pthread.h>

#include <atomic>

namespace lockstep::base {
namespace {

std::atomic<unsigned> count{0};

}  // namespace

unsigned n_forks() noexcept {
  static const int watched =
      ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  (void)watched;
  return count.load(std::memory_order_relaxed);
}

}  // namespace lockstep::base
