#include "lockstep/store/internal/file_replica.h"

#include <unistd.h>

#include <algorithm>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::internal {
namespace {

void put_count(base::ByteWriter& out, std::string_view key, std::int64_t value) {
  encode_record(out, key, to_bytes(std::to_string(value)));
}

Bytes copy(std::span<const std::uint8_t> bytes) {
  return Bytes(bytes.begin(), bytes.end());
}

}  // namespace

// Counting in is the first record of a new file, which check_head() relies on.
FileReplica::FileReplica(std::string path, int world_size, Milliseconds timeout)
    : path_(std::move(path)), world_size_(world_size), owner_(::getpid()) {
  const auto count_in = [&](base::ByteWriter& out)
                            LOCKSTEP_REQUIRES(mutex_) { put_count(out, kRefcountKey, refcount_ + 1); };
  change(timeout, count_in, LockedLog::Mode::kCreate);
}

FileReplica::~FileReplica() {
  // A child made by fork has a copy of this object but was never counted.
  if (::getpid() != owner_) return;
  try {
    sign_off();
  } catch (...) {
    base::log(LogLevel::kDebug, base::cat(path_, ": not signed off: ", base::current_failure().message));
  }
}

// cleanup_ counts all that ever closed: the file is removed when none has it open and all world_size users
// have been here. With one of them still to come it must stay.
void FileReplica::sign_off() {
  mutex_.assume_held();  // called by the destructor: nobody else is here
  constexpr Milliseconds kPatience{2'000};
  if (!LockedLog::peek_size(path_)) return;  // removed already: do not wait for it to come back
  auto log = LockedLog::open(path_, LockedLog::Mode::kWrite, Deadline::after(kPatience));
  if (!log) return;
  replay(*log);
  base::ByteWriter out;
  put_count(out, kCleanupKey, cleanup_ + 1);
  put_count(out, kRefcountKey, refcount_ - 1);
  commit(*log, out);
  if (refcount_ == 0 && world_size_ > 0 && cleanup_ >= world_size_) log->remove();
}

bool FileReplica::all_exist(std::span<const std::string> keys) const {
  return std::all_of(keys.begin(), keys.end(), [&](const auto& key) LOCKSTEP_REQUIRES(mutex_) {
    return values_.contains(key) || queues_.contains(key);
  });
}

const Bytes* FileReplica::find(const std::string& key) const {
  mutex_.assume_held();
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

const std::deque<Bytes>* FileReplica::find_queue(const std::string& key) const {
  mutex_.assume_held();
  const auto found = queues_.find(key);
  return found == queues_.end() ? nullptr : &found->second;
}

std::string FileReplica::describe() const {
  return base::cat("FileStore(", path_, ")");
}

bool FileReplica::refresh(Deadline deadline) {
  // The log only grows, so an unchanged size means nothing new, and readers need not disturb writers.
  if (LockedLog::peek_size(path_) == position_) return true;
  const auto log = LockedLog::open(path_, LockedLog::Mode::kRead, deadline);
  if (log) replay(*log);
  return log.has_value();
}

// Only what other processes appended since the last time is read: everything before position_ is in memory.
void FileReplica::replay(const LockedLog& log) {
  const Bytes bytes = log.read(position_);
  if (position_ == 0) check_head(bytes);
  apply(bytes);
}

// The first record tells a store's file, even a torn one, from a file of somebody else's that we must not
// cut.
void FileReplica::check_head(std::span<const std::uint8_t> bytes) const {
  base::ByteWriter head;
  head.put(static_cast<std::uint32_t>(kRefcountKey.size())).raw(to_bytes(kRefcountKey));
  const std::size_t n = std::min(bytes.size(), head.view().size());
  if (!std::ranges::equal(bytes.first(n), head.view().first(n))) raise_foreign(0);
}

// Applies the whole records of `bytes`, which begin at position_, and moves position_ behind them.
void FileReplica::apply(std::span<const std::uint8_t> bytes) {
  base::ByteReader in(bytes);
  LogRecord record;
  auto decoded = Decoded::kEnd;
  while ((decoded = decode_record(in, record)) == Decoded::kRecord) apply(record);
  position_ += in.position();
  if (decoded == Decoded::kForeign) raise_foreign(position_);
}

void FileReplica::apply(const LogRecord& record) {
  if (record.key == kRefcountKey) {
    refcount_ = add_to_counter(std::string(record.key), record.value, 0);
  } else if (record.key == kCleanupKey) {
    cleanup_ = add_to_counter(std::string(record.key), record.value, 0);
  } else if (record.key[0] == kSetMark[0]) {
    values_.insert_or_assign(std::string(record.key.substr(kSetMark.size())), copy(record.value));
  } else {
    const std::string key(record.key.substr(kDeleteMark.size()));  // the other marks are as long
    if (record.key.starts_with(kDeleteMark)) {
      values_.erase(key);
    } else if (record.key.starts_with(kPushMark)) {
      queues_[key].push_back(copy(record.value));
    } else if (const auto queue = queues_.find(key); queue != queues_.end()) {
      queue->second.pop_front();
      if (queue->second.empty()) queues_.erase(queue);
    }
  }
}

// The own records are applied from memory, after they were written: a write that fails changes nothing here
// either.
void FileReplica::commit(LockedLog& log, const base::ByteWriter& out) {
  if (out.view().empty()) return;
  if (log.size() > position_) {
    lockstep::base::log(LogLevel::kWarn, base::cat(describe(), ": cutting off ", log.size() - position_,
                                                   " bytes of a record whose writer died"));
  }
  log.write(position_, out.view());
  apply(out.view());
  changed_.notify_all();
}

void FileReplica::raise_unavailable(Milliseconds timeout) const {
  base::raise(ErrorKind::kTimeout,
              base::cat(describe(), ": the file was absent, or locked by another process, for ",
                        timeout.count(), " ms"),
              ErrorFamily::kStore);
}

void FileReplica::raise_foreign(std::uint64_t at) const {
  base::raise(
      ErrorKind::kUsage,
      base::cat(describe(), ": byte ", at,
                " does not begin a record: no store wrote this file, or it is damaged; choose a fresh path"),
      ErrorFamily::kStore);
}

}  // namespace lockstep::internal
