// What both directions of a TCP connection carry after the handshake when there is a job secret: records sealed with
// AES-256-GCM under a key per direction and connection.
//
//   record := u32 n, sealed[n], tag[16]        1 <= n <= 64 KiB; the length is authenticated too
//
// The nonce is the direction's secret iv combined with the record's number, which is counted and never sent: a record
// that was changed, repeated, left out, moved or made up does not open, and nothing after it does. A stream may still
// be cut at any point; both users of this treat an end as an error unless they have the answer they wait for. After
// 2^20 records each direction moves on to a key derived from the one before, far below the limits of GCM.
//
// Not for local sockets: their two ends are connected by the kernel, and the name that was called is in the proofs.
//
// A forked child has its parent's keys and numbers: what it sealed would share a nonce with what its parent seals next, which
// gives both texts away. There sealing raises kUsage.
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

  // `in` to `out`, which may be the same; writes or compares the tag. False when a record does not open. Each call
  // is one record. Raises kUsage in a forked child.
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
  std::uint64_t number_ = 0;  // of the next record under this key
  base::MadeHere made_here_;
  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
};

class Sealer {
 public:
  explicit Sealer(const DirectionKey& key, std::uint64_t records_per_key = kRecordsPerKey)
      : cipher_(key, RecordCipher::Direction::kSeal, records_per_key) {}
  // Appends to `out` as many records as `plain` needs; nothing for nothing. Raises kUsage in a forked child.
  void seal(std::span<const std::uint8_t> plain, Bytes& out);

 private:
  RecordCipher cipher_;
};

class Opener {
 public:
  explicit Opener(const DirectionKey& key, std::uint64_t records_per_key = kRecordsPerKey)
      : cipher_(key, RecordCipher::Direction::kOpen, records_per_key) {}
  // Takes bytes away from the front of `bytes`, in the order in which they came, until a record is complete, and gives
  // its plain text, which holds until the next call of any Opener on this thread. Nothing: all of `bytes` is taken and
  // more are needed, or failed().
  std::optional<std::span<const std::uint8_t>> next(std::span<const std::uint8_t>& bytes);
  // Something came that the peer did not seal; nothing more is taken.
  bool failed() const { return failed_; }
  // Nothing of a next record has come.
  bool between_records() const { return held_.empty(); }

 private:
  std::optional<std::span<const std::uint8_t>> open(std::span<const std::uint8_t> record);
  std::size_t whole_size(std::span<const std::uint8_t> head);

  RecordCipher cipher_;
  Bytes held_;  // of a record that is not complete
  bool failed_ = false;
};

}  // namespace lockstep::net
