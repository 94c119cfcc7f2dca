// Device memory and registered host memory of this process: what the driver knows about an address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>

#include "tests/fake_cuda/cuda_abi.h"

namespace fake_cuda {

struct Block {
  enum class Kind : std::uint8_t { kOwn, kOpened, kRegistered } kind;
  std::uintptr_t base;  // of the address that the program has
  std::size_t n_bytes;  // as asked for
  std::size_t n_mapped;
  std::byte* host;  // where the contents are
  int fd;           // kOwn: the memfd
  int device;
  std::uint64_t id;      // CU_POINTER_ATTRIBUTE_BUFFER_ID: never used twice
  int n_opened;          // kOpened: by how many calls
  std::uint64_t origin;  // kOpened: the memfd's inode
  bool exportable;
};

class Memory {
 public:
  CUresult allocate(int device, std::size_t n_bytes, CUdeviceptr* out);
  // Pre of the three below: the streams that use the memory are idle.
  CUresult free(CUdeviceptr address);
  CUresult close(CUdeviceptr address);
  CUresult unregister(const void* host);

  CUresult register_host(int device, void* host, std::size_t n_bytes);
  CUresult export_handle(CUdeviceptr address, CUipcMemHandle* out);
  CUresult open(int device, const CUipcMemHandle& handle, CUdeviceptr* out);
  void make_unexportable(CUdeviceptr address);

  std::optional<Block> find(std::uintptr_t address) const;
  // The contents of [address, address + n_bytes), or null when they are not all of one block.
  std::byte* contents(std::uintptr_t address, std::size_t n_bytes) const;
  bool owns(CUdeviceptr base, Block::Kind kind) const;

  void limit(std::size_t n_bytes) { limit_ = n_bytes; }
  std::size_t limit() const { return limit_; }
  std::size_t used(int device) const;

 private:
  CUresult map(Block block, CUdeviceptr* out);

  mutable std::shared_mutex mutex_;
  std::map<std::uintptr_t, Block> blocks_;
  std::uint64_t last_id_ = 0;
  std::size_t limit_ = std::size_t{1} << 36;
};

}  // namespace fake_cuda
