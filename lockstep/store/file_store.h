// A store in one append-only file, for processes that share a local disk or NFS. The format is that of
// torch's FileStore (internal/file_log.h), extended by queues. Writers hold the file's exclusive lock,
// readers its shared lock; each handle replays what others appended since its last read.
//
// A waiting call polls the file every few milliseconds (notification does not work across NFS) and ends at
// its timeout to the millisecond. A process that dies while writing leaves a torn record, which the next
// writer truncates; a process that dies at any time leaves its count behind, so the file is not removed: use
// a new path for every job.
//
// Trust: whoever can write to the file decides what every rank reads. It must therefore belong to this user,
// must not be writable by others, and the last component of its path must not be a symbolic link; this is
// checked in every operation.
//
// Thread safety: as Store; a waiting thread holds nothing that others need. Ownership: clones share one open
// file.
// Errors: DistStoreError for every failure of the file, naming its path.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "lockstep/store/store.h"

namespace lockstep {

namespace internal {
class FileReplica;
}

struct FileStoreOptions {
  std::optional<int>
      n_users{};  // the last of that many to close the file removes it; unset: any number, and it is kept
  Milliseconds timeout = kDefaultStoreTimeout;
};

class FileStore final : public Store {
 public:
  // Creates the file (not its directory) when absent, readable by this user only. Raises DistStoreError when
  // it cannot be created, is not trusted (above) or is not the file of a store (it is then left unchanged),
  // or cannot be locked within the timeout.
  static std::unique_ptr<FileStore> open(const std::string& path, const FileStoreOptions& options = {});
  ~FileStore() override;

  using Store::set;
  void set(const std::string& key, std::span<const std::uint8_t> value) override;
  Bytes get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  Bytes compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                    std::span<const std::uint8_t> desired) override;
  bool check(std::span<const std::string> keys) override;
  void wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout = {}) override;
  bool delete_key(const std::string& key) override;
  std::int64_t num_keys() override;
  std::vector<std::string> list_keys() override;
  // Writes the whole new value again, under the exclusive lock.
  void append(const std::string& key, std::span<const std::uint8_t> value) override;
  std::vector<Bytes> multi_get(std::span<const std::string> keys) override;
  void multi_set(std::span<const std::string> keys, std::span<const Bytes> values) override;
  void queue_push(const std::string& key, std::span<const std::uint8_t> value) override;
  Bytes queue_pop(const std::string& key) override;
  std::optional<Bytes> try_queue_pop(const std::string& key) override;
  std::int64_t queue_len(const std::string& key) override;
  std::unique_ptr<Store> clone() override;
  bool has_extended_api() const override { return false; }
  void set_timeout(Milliseconds timeout) override;
  Milliseconds timeout() const override { return timeout_; }
  std::string describe() const override;

  const std::string& path() const;

 private:
  FileStore(std::shared_ptr<internal::FileReplica> file, Milliseconds timeout);
  // The queue's oldest entry, if there is one.
  std::optional<Bytes> take(const std::string& key);

  // Shared by clones; the last one decrements the count in the file.
  const std::shared_ptr<internal::FileReplica> file_;
  std::atomic<Milliseconds> timeout_;
};

}  // namespace lockstep
