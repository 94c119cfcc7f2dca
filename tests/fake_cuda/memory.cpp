#include "tests/fake_cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace fake_cuda {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kMagic = 0x454c444e41484946;

// What an IPC handle holds. The exporter's descriptor is opened through /proc; the inode tells a reused process or
// descriptor number from the one that was meant.
struct Handle {
  std::uint64_t magic;
  std::int64_t pid;
  std::int64_t fd;
  std::uint64_t inode;
  std::uint64_t n_bytes;
  std::int64_t device;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));

std::size_t whole_pages(std::size_t n_bytes) {
  return (n_bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

// Reserves the address the program gets, which nothing can touch, and maps the contents elsewhere.
CUresult Memory::map(Block block, CUdeviceptr* out) {
  void* const contents = ::mmap(nullptr, block.n_mapped, PROT_READ | PROT_WRITE, MAP_SHARED, block.fd, 0);
  if (contents == MAP_FAILED) return kOutOfMemory;
  void* const address =
      ::mmap(nullptr, block.n_mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    ::munmap(contents, block.n_mapped);
    return kOutOfMemory;
  }
  block.host = static_cast<std::byte*>(contents);
  block.base = reinterpret_cast<std::uintptr_t>(address);
  block.id = ++last_id_;
  blocks_.emplace(block.base, block);
  *out = block.base;
  return kSuccess;
}

CUresult Memory::allocate(int device, std::size_t n_bytes, CUdeviceptr* out) {
  if (n_bytes == 0 || out == nullptr) return kInvalidValue;
  const std::size_t n_mapped = whole_pages(n_bytes);
  if (n_mapped > limit_ || used(device) > limit_ - n_mapped) return kOutOfMemory;
  const int fd = ::memfd_create("fake_cuda", MFD_CLOEXEC);
  if (fd < 0) return kOutOfMemory;
  const std::unique_lock lock(mutex_);
  Block block{.kind = Block::Kind::kOwn,
              .n_bytes = n_bytes,
              .n_mapped = n_mapped,
              .fd = fd,
              .device = device,
              .exportable = true};
  CUresult result = kOutOfMemory;
  if (::ftruncate(fd, static_cast<off_t>(n_mapped)) == 0) result = map(block, out);
  if (result != kSuccess) {
    ::close(fd);
    return result;
  }
  // New memory holds anything but zeros; the beginning is enough to catch who relies on them.
  std::memset(blocks_.at(*out).host, 0xcd, std::min<std::size_t>(n_mapped, 16 * kPage));
  return kSuccess;
}

CUresult Memory::free(CUdeviceptr address) {
  const std::unique_lock lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end() || found->second.kind != Block::Kind::kOwn) return kInvalidValue;
  ::munmap(found->second.host, found->second.n_mapped);
  ::munmap(reinterpret_cast<void*>(found->first), found->second.n_mapped);
  ::close(found->second.fd);
  blocks_.erase(found);
  return kSuccess;
}

CUresult Memory::export_handle(CUdeviceptr address, CUipcMemHandle* out) {
  const auto block = find(address);
  if (!block || block->kind != Block::Kind::kOwn || !block->exportable || out == nullptr)
    return kInvalidValue;
  struct stat status {};
  if (::fstat(block->fd, &status) != 0) return kInvalidValue;
  const Handle handle{kMagic, ::getpid(), block->fd, status.st_ino, block->n_bytes, block->device};
  *out = {};
  std::memcpy(out, &handle, sizeof handle);
  return kSuccess;
}

CUresult Memory::open(int device, const CUipcMemHandle& given, CUdeviceptr* out) {
  Handle handle{};
  std::memcpy(&handle, &given, sizeof handle);
  if (handle.magic != kMagic || out == nullptr) return kInvalidValue;
  if (handle.pid == ::getpid()) return kInvalidContext;
  const std::unique_lock lock(mutex_);
  for (auto& [base, block] : blocks_) {  // open already: the same address once more
    if (block.kind == Block::Kind::kOpened && block.origin == handle.inode && block.device == device) {
      ++block.n_opened;
      *out = base;
      return kSuccess;
    }
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%lld/fd/%lld", static_cast<long long>(handle.pid),
                static_cast<long long>(handle.fd));
  const int fd = ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  struct stat status {};
  CUresult result = kInvalidValue;
  if (::fstat(fd, &status) == 0 && status.st_ino == handle.inode) {
    result = map({.kind = Block::Kind::kOpened,
                  .n_bytes = handle.n_bytes,
                  .n_mapped = whole_pages(handle.n_bytes),
                  .fd = fd,
                  .device = device,
                  .n_opened = 1,
                  .origin = handle.inode},
                 out);
  }
  ::close(fd);
  return result;
}

CUresult Memory::close(CUdeviceptr address) {
  const std::unique_lock lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end() || found->second.kind != Block::Kind::kOpened) return kInvalidValue;
  if (--found->second.n_opened > 0) return kSuccess;
  ::munmap(found->second.host, found->second.n_mapped);
  ::munmap(reinterpret_cast<void*>(found->first), found->second.n_mapped);
  blocks_.erase(found);
  return kSuccess;
}

CUresult Memory::register_host(int device, void* host, std::size_t n_bytes) {
  if (host == nullptr || n_bytes == 0) return kInvalidValue;
  const auto base = reinterpret_cast<std::uintptr_t>(host);
  const auto first = base / kPage * kPage, end = whole_pages(base + n_bytes);
  // mincore fails where nothing is mapped.
  unsigned char resident = 0;
  for (auto page = first; page < end; page += kPage) {
    if (::mincore(reinterpret_cast<void*>(page), kPage, &resident) != 0) return kInvalidValue;
  }
  const std::unique_lock lock(mutex_);
  const auto above = blocks_.lower_bound(base);
  if (above != blocks_.end() && above->first < base + n_bytes) return kHostMemoryAlreadyRegistered;
  if (above != blocks_.begin()) {
    const auto& below = std::prev(above)->second;
    if (below.base + below.n_bytes > base) return kHostMemoryAlreadyRegistered;
  }
  blocks_.emplace(base, Block{.kind = Block::Kind::kRegistered,
                              .base = base,
                              .n_bytes = n_bytes,
                              .n_mapped = n_bytes,
                              .host = static_cast<std::byte*>(host),
                              .fd = -1,
                              .device = device,
                              .id = ++last_id_});
  return kSuccess;
}

CUresult Memory::unregister(const void* host) {
  const std::unique_lock lock(mutex_);
  const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(host));
  if (found == blocks_.end() || found->second.kind != Block::Kind::kRegistered)
    return kHostMemoryNotRegistered;
  blocks_.erase(found);
  return kSuccess;
}

void Memory::make_unexportable(CUdeviceptr address) {
  const auto block = find(address);
  const std::unique_lock lock(mutex_);
  if (block) blocks_.at(block->base).exportable = false;
}

std::optional<Block> Memory::find(std::uintptr_t address) const {
  const std::shared_lock lock(mutex_);
  auto above = blocks_.upper_bound(address);
  if (above == blocks_.begin()) return std::nullopt;
  const Block& block = std::prev(above)->second;
  if (address >= block.base + block.n_bytes) return std::nullopt;
  return block;
}

std::byte* Memory::contents(std::uintptr_t address, std::size_t n_bytes) const {
  const auto block = find(address);
  if (!block || n_bytes > block->base + block->n_bytes - address) return nullptr;
  return block->host + (address - block->base);
}

bool Memory::owns(CUdeviceptr base, Block::Kind kind) const {
  const auto block = find(base);
  return block && block->base == base && block->kind == kind;
}

std::size_t Memory::used(int device) const {
  const std::shared_lock lock(mutex_);
  std::size_t total = 0;
  for (const auto& [base, block] : blocks_) {
    if (block.kind == Block::Kind::kOwn && block.device == device) total += block.n_mapped;
  }
  return total;
}

}  // namespace fake_cuda
