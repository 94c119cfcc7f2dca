#include "lockstep/ddp/internal/flat_broadcast.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/group/world.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {
namespace {

// A range of one tensor's bytes inside a chunk.
struct Piece {
  std::size_t tensor;
  std::size_t at;  // byte offset in the tensor
  std::size_t n_bytes;
};

// Small tensors share a chunk, large ones are spread over several. A pure function of the sizes, hence the
// same on all ranks.
std::vector<std::vector<Piece>> cut(const std::vector<at::Tensor>& tensors, std::size_t chunk_bytes) {
  std::vector<std::vector<Piece>> chunks;
  std::size_t room = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const std::size_t size = tensors[t].nbytes();
    for (std::size_t at = 0; at < size;) {
      if (room == 0) {
        chunks.emplace_back();
        room = chunk_bytes;
      }
      const std::size_t n_bytes = std::min(room, size - at);
      chunks.back().push_back({t, at, n_bytes});
      at += n_bytes;
      room -= n_bytes;
    }
  }
  return chunks;
}

std::size_t bytes_of(const std::vector<Piece>& chunk) {
  std::size_t n_bytes = 0;
  for (const Piece& piece : chunk) n_bytes += piece.n_bytes;
  return n_bytes;
}

// The bytes of a piece, as a tensor.
at::Tensor bytes_of(const Piece& piece, const at::Tensor& dense) {
  return dense.view({-1}).view(at::kByte).narrow(0, static_cast<std::int64_t>(piece.at),
                                                 static_cast<std::int64_t>(piece.n_bytes));
}

// On a GPU: copies in the current stream. What is received is written without comparing, which would have to wait
// for the device.
void copy_on_device(const std::vector<Piece>& chunk, const std::vector<at::Tensor>& tensors,
                    const at::Tensor& memory, std::vector<bool>* changed) {
  std::int64_t at = 0;
  for (const Piece& piece : chunk) {
    const auto here = memory.narrow(0, at, static_cast<std::int64_t>(piece.n_bytes));
    const auto there = bytes_of(piece, tensors[piece.tensor]);
    changed == nullptr ? here.copy_(there, true) : there.copy_(here, true);
    if (changed != nullptr) (*changed)[piece.tensor] = true;
    at += static_cast<std::int64_t>(piece.n_bytes);
  }
}

void pack(const std::vector<Piece>& chunk, const std::vector<at::Tensor>& tensors, const at::Tensor& memory) {
  if (!memory.is_cpu()) return copy_on_device(chunk, tensors, memory, nullptr);
  auto* to = static_cast<std::byte*>(memory.mutable_data_ptr());
  for (const Piece& piece : chunk) {
    std::memcpy(to, static_cast<const std::byte*>(tensors[piece.tensor].const_data_ptr()) + piece.at,
                piece.n_bytes);
    to += piece.n_bytes;
  }
}

// Compared before it is written: tensors that have not changed keep their version, so that saved tensors of a
// graph stay valid.
void unpack(const std::vector<Piece>& chunk, const std::vector<at::Tensor>& tensors, const at::Tensor& memory,
            std::vector<bool>& changed) {
  if (!memory.is_cpu()) return copy_on_device(chunk, tensors, memory, &changed);
  const auto* from = static_cast<const std::byte*>(memory.const_data_ptr());
  for (const Piece& piece : chunk) {
    auto* to = static_cast<std::byte*>(tensors[piece.tensor].mutable_data_ptr()) + piece.at;
    if (std::memcmp(to, from, piece.n_bytes) != 0) {
      std::memcpy(to, from, piece.n_bytes);
      changed[piece.tensor] = true;
    }
    from += piece.n_bytes;
  }
}

}  // namespace

void broadcast_from(int root, const at::Tensor& tensor, const Group& group, std::source_location where) {
  broadcast(tensor, {.group_src = root, .group = group, .where = where});
}

void raise_forward_alone(const Error& error) {
  Failure failure = error.failure();
  failure.message +=
      ". This is what ranks exchange at the start of forward(), which all of them must call, in evaluation "
      "too; to evaluate "
      "on one rank alone call model->module()->forward()";
  base::raise(std::move(failure));
}

FlatBroadcast::FlatBroadcast(Group group, std::source_location where)
    : group_(std::move(group)), where_(where) {}

at::Tensor FlatBroadcast::chunk_memory(std::size_t slot, std::size_t n_bytes, c10::Device device) {
  at::Tensor& memory = memory_[slot];
  if (!memory.defined() || memory.nbytes() < n_bytes || memory.device() != device) {
    memory.reset();  // back to the group first
    memory =
        empty_shared({static_cast<std::int64_t>(n_bytes)}, at::kByte, {.group = group_, .device = device});
  }
  return memory.narrow(0, 0, static_cast<std::int64_t>(n_bytes));
}

// Tensors of each device travel together. The order of devices is that of the tensors, the same on all ranks.
void FlatBroadcast::run(const std::vector<at::Tensor>& whole, int root) {
  std::vector<std::vector<at::Tensor>> by_device;
  for (const at::Tensor& tensor : whole) {
    const auto found = std::ranges::find_if(
        by_device, [&](const auto& some) { return some.front().device() == tensor.device(); });
    found == by_device.end() ? by_device.push_back({tensor}) : found->push_back(tensor);
  }
  for (const auto& some : by_device) run_on_device(some, root);
}

void FlatBroadcast::run_on_device(const std::vector<at::Tensor>& whole, int root) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<at::Tensor> tensors = local_shards(whole);
  const bool is_root = group_->rank() == root;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& tensor : tensors) dense.push_back(tensor.contiguous());
  const std::vector<std::vector<Piece>> chunks = cut(dense, kChunkBytes);
  std::vector<bool> changed(tensors.size(), false);

  // Two chunks in flight: one is packed or unpacked while the other is sent.
  std::array<at::Tensor, 2> flying;
  std::array<Work, 2> works;
  // Slot k % 2 is reused for chunk k + 2 only after chunk k has landed.
  const auto land = [&](std::size_t k) {
    works[k % 2].wait();
    if (!is_root) unpack(chunks[k], dense, flying[k % 2], changed);
  };
  for (std::size_t k = 0; k < chunks.size(); ++k) {
    if (k >= 2) land(k - 2);
    flying[k % 2] = chunk_memory(k % 2, bytes_of(chunks[k]), dense.front().device());
    if (is_root) pack(chunks[k], dense, flying[k % 2]);
    works[k % 2] =
        broadcast(flying[k % 2], {.group_src = root, .group = group_, .async_op = true, .where = where_});
  }
  for (std::size_t k = chunks.size() < 2 ? 0 : chunks.size() - 2; k < chunks.size(); ++k) land(k);

  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (!changed[t]) continue;
    if (!dense[t].is_same(tensors[t])) tensors[t].copy_(dense[t]);
    if (!whole[t].is_inference()) whole[t].unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace lockstep::internal
