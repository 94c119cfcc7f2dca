// A small array that every rank made by fork_ranks can write: where ranks leave their numbers for rank 0.
// Create it before the fork. Not synchronised: Link's calls order the accesses.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <stdexcept>
#include <type_traits>

namespace bench {

template <class T>
class SharedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit SharedArray(std::size_t n) : n_bytes_(n * sizeof(T)) {
    void* memory = ::mmap(nullptr, n_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no shared mapping for the ranks' numbers");
    values_ = static_cast<T*>(memory);
  }
  ~SharedArray() { ::munmap(values_, n_bytes_); }
  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;

  T& operator[](std::size_t i) { return values_[i]; }

 private:
  const std::size_t n_bytes_;
  T* values_ = nullptr;
};

}  // namespace bench
