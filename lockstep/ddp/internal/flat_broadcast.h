// Broadcasts many tensors with few operations: their bytes are concatenated and sent in chunks, two in
// flight, so that element types do not matter and memory stays bounded.
// Thread safety: one caller at a time; all ranks call with tensors of the same byte sizes in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <source_location>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/group/process_group.h"

namespace lockstep::internal {

// Blocks until `tensor` holds the values of rank `root` of the group.
void broadcast_from(int root, const at::Tensor& tensor, const Group& group, std::source_location where);

// Rethrows the error of an exchange at the start of a forward pass, with the likely cause: not all ranks
// called forward(). Call inside a catch block.
[[noreturn]] void raise_forward_alone(const Error& error);

class FlatBroadcast {
 public:
  // torch sends flat buckets of 250 MiB, two in flight; smaller chunks are copied in and out while others are
  // being sent.
  static constexpr std::size_t kChunkBytes = 16 * 1024 * 1024;

  FlatBroadcast(Group group, std::source_location where);

  // Blocks until the tensors hold the values of rank `root` of the group. A tensor that holds them already is
  // not written to, so graphs that saved it stay valid. Of sharded tensors the local pieces are sent. Keeps its chunk memory for the next call.
  void run(const std::vector<at::Tensor>& whole, int root = 0);

 private:
  at::Tensor chunk_memory(std::size_t slot, std::size_t n_bytes, c10::Device device);
  void run_on_device(const std::vector<at::Tensor>& tensors, int root);

  const Group group_;
  const std::source_location where_;
  std::array<at::Tensor, 2> memory_;
};

}  // namespace lockstep::internal
