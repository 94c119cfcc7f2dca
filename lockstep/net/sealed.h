// The record format of a TCP connection after the handshake, when there is a job secret: AES-256-GCM with one
// key per direction and connection.
//
//   record := u32 n, sealed[n], tag[16]        1 <= n <= 64 KiB; the length is authenticated too
//
// The nonce is the direction's secret iv combined with the record number, which is counted and never sent: a
// record that was modified, replayed, dropped, reordered or forged fails authentication, and so does
// everything after it. A stream may still be truncated at any point; both users treat end of stream as an
// error unless they already have the answer they wait for. After 2^20 records, far below the limits of GCM,
// each direction derives a new key from the previous one.
//
// Not used on local sockets: the kernel connects their two ends, and the handshake's proofs cover the
// socket's name.
//
// A forked child has its parent's keys and record numbers: its next record would reuse the nonce of its
// parent's next record, which reveals both plaintexts. Sealing in a forked child therefore raises kUsage.
//
// No I/O. Thread safety: none; one Sealer and one Opener per connection.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/forks.h"
#include "lockstep/net/handshake.h"

struct evp_cipher_ctx_st;

namespace lockstep::net {

inline constexpr std::size_t kMaxRecord = 64 << 10;
inline constexpr std::size_t kRecordHead = 4;
inline constexpr std::size_t kRecordTag = 16;
inline constexpr std::uint64_t kRecordsPerKey = 1 << 20;

// Key, counter and cipher of one direction.
class RecordCipher {
 public:
  enum class Direction : bool { kOpen, kSeal };
  RecordCipher(const DirectionKey& key, Direction direction, std::uint64_t records_per_key);

  // One record: `in` to `out`, which may be the same; writes or verifies the tag. False when authentication
  // fails. Raises kUsage in a forked child.
  bool run(std::span<const std::uint8_t, kRecordHead> head, std::span<const std::uint8_t> in,
           std::uint8_t* out, std::uint8_t* tag);

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st* context) const;
  };
  void use_key();
  void next_key();

  DirectionKey key_;
  Direction direction_;
  std::uint64_t records_per_key_;
  std::uint64_t number_ = 0;  // number of the next record under this key
  base::MadeHere made_here_;
  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
};

class Sealer {
 public:
  explicit Sealer(const DirectionKey& key, std::uint64_t records_per_key = kRecordsPerKey)
      : cipher_(key, RecordCipher::Direction::kSeal, records_per_key) {}
  // Appends as many records to `out` as `plain` needs; none when it is empty. Raises kUsage in a forked
  // child.
  void seal(std::span<const std::uint8_t> plain, Bytes& out);

 private:
  RecordCipher cipher_;
};

class Opener {
 public:
  explicit Opener(const DirectionKey& key, std::uint64_t records_per_key = kRecordsPerKey)
      : cipher_(key, RecordCipher::Direction::kOpen, records_per_key) {}
  // Consumes received bytes from the front of `bytes` until a record is complete and returns its plaintext,
  // valid until the next call of any Opener on this thread. Nothing when all of `bytes` is consumed and more
  // is needed, or after failed().
  std::optional<std::span<const std::uint8_t>> next(std::span<const std::uint8_t>& bytes);
  // A record failed authentication; no more input is accepted.
  bool failed() const { return failed_; }
  // True at a record boundary: no partial record is buffered.
  bool between_records() const { return held_.empty(); }

 private:
  std::optional<std::span<const std::uint8_t>> open(std::span<const std::uint8_t> record);
  std::size_t whole_size(std::span<const std::uint8_t> head);

  RecordCipher cipher_;
  Bytes held_;  // bytes of an incomplete record
  bool failed_ = false;
};

}  // namespace lockstep::net
