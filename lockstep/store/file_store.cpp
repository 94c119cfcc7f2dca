#include "lockstep/store/file_store.h"

#include <algorithm>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/error.h"
#include "lockstep/store/internal/checks.h"
#include "lockstep/store/internal/file_replica.h"

namespace lockstep {

// Operations are made of change(), read() and read_when() of the replica. Their callbacks run under the
// replica's mutex, in change() also under the exclusive lock of the file; they must not call another
// operation, which would deadlock. What an edit puts into `out` is written when it has returned: an edit that
// throws leaves the file as it was.

namespace {

void put(base::ByteWriter& out, std::string_view mark, const std::string& key,
         std::span<const std::uint8_t> value = {}) {
  internal::encode_record(out, base::cat(mark, key), value);
}

}  // namespace

// The timeout belongs to the handle: clones may have different ones.
FileStore::FileStore(std::shared_ptr<internal::FileReplica> file, Milliseconds timeout)
    : file_(std::move(file)), timeout_(timeout) {}
FileStore::~FileStore() = default;

std::unique_ptr<FileStore> FileStore::open(const std::string& path, const FileStoreOptions& options) {
  if (path.empty()) base::raise(ErrorKind::kUsage, "FileStore: the path is empty", ErrorFamily::kStore);
  if (options.n_users && *options.n_users < 1) {
    base::raise(
        ErrorKind::kUsage,
        base::cat("FileStore: n_users is ", *options.n_users, "; it must be positive, unset when unknown"),
        ErrorFamily::kStore);
  }
  // All arguments are checked before the replica is made: its constructor creates the file and counts this
  // process in.
  base::checked_timeout(options.timeout, base::cat("FileStore ", path), ErrorFamily::kStore);
  const int n_users = options.n_users.value_or(-1);
  return std::unique_ptr<FileStore>(new FileStore(
      std::make_shared<internal::FileReplica>(path, n_users, options.timeout), options.timeout));
}

const std::string& FileStore::path() const {
  return file_->path();
}

std::string FileStore::describe() const {
  return file_->describe();
}

void FileStore::set(const std::string& key, std::span<const std::uint8_t> value) {
  file_->change(timeout_, [&](base::ByteWriter& out) { put(out, internal::kSetMark, key, value); });
}

Bytes FileStore::get(const std::string& key) {
  return std::move(multi_get({&key, 1}).front());
}

std::int64_t FileStore::add(const std::string& key, std::int64_t amount) {
  return file_->change(timeout_, [&](base::ByteWriter& out) {
    // Read and written under one lock, so two processes never get the same number. The log keeps the result
    // and not the amount: replaying a record needs no earlier one of its key.
    const Bytes* before = file_->find(key);
    const std::int64_t after = before ? internal::add_to_counter(key, *before, amount) : amount;
    put(out, internal::kSetMark, key, to_bytes(std::to_string(after)));
    return after;
  });
}

Bytes FileStore::compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                             std::span<const std::uint8_t> desired) {
  return file_->change(timeout_, [&](base::ByteWriter& out) {
    const Bytes* current = file_->find(key);
    // As torch: an absent key is set only when "" is expected of it. Nothing is put into `out` on the first
    // two returns, so nothing is written.
    if (!current && !expected.empty()) return to_bytes(expected);
    if (current && !std::ranges::equal(*current, expected)) return *current;
    put(out, internal::kSetMark, key, desired);
    return to_bytes(desired);
  });
}

bool FileStore::check(std::span<const std::string> keys) {
  return file_->read(timeout_, [&] { return file_->all_exist(keys); });
}

void FileStore::wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout) {
  if (timeout) base::checked_timeout(*timeout, base::cat(describe(), ": wait"), ErrorFamily::kStore);
  // Tells only that the keys existed at one moment: another process may delete them before the caller reads.
  // get() waits and reads under one lock instead.
  file_->read_when(
      {keys, timeout.value_or(timeout_.load())}, [&] { return file_->all_exist(keys); }, [] {});
}

bool FileStore::delete_key(const std::string& key) {
  return file_->change(timeout_, [&](base::ByteWriter& out) {
    const bool existed = file_->find(key) != nullptr;
    if (existed) put(out, internal::kDeleteMark, key);
    return existed;
  });
}

std::int64_t FileStore::num_keys() {
  // The refcount is one more, as in torch.
  return file_->read(timeout_, [&] { return static_cast<std::int64_t>(file_->values().size()) + 1; });
}

std::vector<std::string> FileStore::list_keys() {
  return file_->read(timeout_, [&] {
    std::vector<std::string> keys;
    keys.reserve(file_->values().size());
    for (const auto& [key, value] : file_->values()) keys.push_back(key);
    return keys;
  });
}

void FileStore::append(const std::string& key, std::span<const std::uint8_t> value) {
  file_->change(timeout_, [&](base::ByteWriter& out) {
    const Bytes* before = file_->find(key);
    Bytes after = before ? *before : Bytes();
    after.insert(after.end(), value.begin(), value.end());
    put(out, internal::kSetMark, key, after);
  });
}

std::vector<Bytes> FileStore::multi_get(std::span<const std::string> keys) {
  const auto collect = [&] {
    std::vector<Bytes> values;
    values.reserve(keys.size());
    for (const auto& key : keys) {
      // all_exist() counts queues too, so a key that exists without a value is a queue.
      const Bytes* value = file_->find(key);
      if (!value) internal::raise_is_queue(describe(), key);
      values.push_back(*value);
    }
    return values;
  };
  return file_->read_when(
      {keys, timeout_}, [&] { return file_->all_exist(keys); }, collect);
}

void FileStore::multi_set(std::span<const std::string> keys, std::span<const Bytes> values) {
  internal::check_pairs(keys.size(), values.size());
  // One write under one lock: readers see all pairs or none. A process that dies in the middle of it leaves
  // the whole records before the torn one.
  file_->change(timeout_, [&](base::ByteWriter& out) {
    for (std::size_t i = 0; i < keys.size(); ++i) put(out, internal::kSetMark, keys[i], values[i]);
  });
}

void FileStore::queue_push(const std::string& key, std::span<const std::uint8_t> value) {
  file_->change(timeout_, [&](base::ByteWriter& out) { put(out, internal::kPushMark, key, value); });
}

std::optional<Bytes> FileStore::take(const std::string& key) {
  return file_->change(timeout_, [&](base::ByteWriter& out) -> std::optional<Bytes> {
    const auto* queue = file_->find_queue(key);
    if (!queue) return std::nullopt;
    // The record is applied after this callback: until then `queue` and its front are still there to be
    // copied. A queue in the map is never empty.
    put(out, internal::kTakeMark, key);
    return queue->front();
  });
}

Bytes FileStore::queue_pop(const std::string& key) {
  // One deadline for all rounds, however often another process is faster.
  const internal::FileWait wait{{&key, 1}, timeout_};
  for (;;) {
    file_->read_when(
        wait, [&] { return file_->find_queue(key) != nullptr; }, [] {});
    // Seen is not taken: another process may have been quicker.
    if (auto entry = take(key)) return *std::move(entry);
  }
}

std::optional<Bytes> FileStore::try_queue_pop(const std::string& key) {
  return take(key);
}

std::int64_t FileStore::queue_len(const std::string& key) {
  return file_->read(timeout_, [&] {
    const auto* queue = file_->find_queue(key);
    return queue ? static_cast<std::int64_t>(queue->size()) : 0;
  });
}

void FileStore::set_timeout(Milliseconds timeout) {
  timeout_ = base::checked_timeout(timeout, base::cat(describe(), ": set_timeout"), ErrorFamily::kStore);
}

std::unique_ptr<Store> FileStore::clone() {
  // The same replica: one count in the file, one copy of the data, and one mutex, which a clone that waits
  // releases.
  return std::unique_ptr<Store>(new FileStore(file_, timeout_));
}

}  // namespace lockstep
