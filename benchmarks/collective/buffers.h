// The buffers of a case in memory that a function hands out: what contenders without tensors share.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "benchmarks/collective/case.h"

namespace bench {

class Buffers {
 public:
  using Memory = std::unique_ptr<float, std::function<void(void*)>>;
  using Allocate = std::function<Memory(std::size_t n_bytes)>;

  // Ordinary memory, on a cache line of its own.
  static Memory ordinary(std::size_t n_bytes) {
    void* memory = std::aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    if (memory == nullptr) throw std::bad_alloc();
    return {static_cast<float*>(memory), [](void* p) { std::free(p); }};
  }

  // Makes the buffers of `which`. False: they were there already.
  bool prepare(const Case& which, const Allocate& allocate) {
    if (which == which_ && !send_.empty()) return false;
    send_.clear();
    recv_.clear();
    which_ = which;
    for (std::size_t i = 0; i < which.n_buffers; ++i) {
      send_.push_back(made(which.n_send(), allocate));
      recv_.push_back(which.row().in_place ? nullptr : made(which.n_recv(), allocate));
    }
    return true;
  }

  const Case& which() const { return which_; }
  std::span<float> send(std::size_t i) const { return {send_[i].get(), which_.n_send()}; }
  std::span<float> recv(std::size_t i) const {
    return which_.row().in_place ? send(i) : std::span<float>{recv_[i].get(), which_.n_recv()};
  }

 private:
  static Memory made(std::size_t n, const Allocate& allocate) {
    return n == 0 ? nullptr : allocate(n * sizeof(float));
  }

  Case which_;
  std::vector<Memory> send_;
  std::vector<Memory> recv_;
};

}  // namespace bench
