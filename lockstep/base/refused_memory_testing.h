// For test programs: replaces operator new, so that a test can refuse memory where it wants. Include it in one
// source of the program; define refuse_allocation() there.
#pragma once

#include <cstdlib>
#include <new>

namespace lockstep::testing {

// Whether this allocation is refused. Called by every one, on any thread; must not allocate.
bool refuse_allocation();

// Not inlined: the compiler would see malloc paired with delete.
[[gnu::noinline]] inline void* allocate(std::size_t n_bytes) {
  if (!refuse_allocation()) {
    if (void* block = std::malloc(n_bytes != 0 ? n_bytes : 1)) return block;
  }
  throw std::bad_alloc();
}

}  // namespace lockstep::testing

void* operator new(std::size_t n_bytes) {
  return lockstep::testing::allocate(n_bytes);
}
void* operator new[](std::size_t n_bytes) {
  return lockstep::testing::allocate(n_bytes);
}
void operator delete(void* block) noexcept {
  std::free(block);
}
void operator delete[](void* block) noexcept {
  std::free(block);
}
void operator delete(void* block, std::size_t) noexcept {
  std::free(block);
}
void operator delete[](void* block, std::size_t) noexcept {
  std::free(block);
}
