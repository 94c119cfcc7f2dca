#include "lockstep/net/sealed.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/net/internal/hmac.h"

namespace lockstep::net {

namespace {

constexpr std::string_view kNextLabel = "lockstep 2 next";

[[noreturn]] void fail(const char* what) {
  base::raise(ErrorKind::kInternal, what, ErrorFamily::kNetwork);
}

// A record: length (little endian, without head and tag), sealed bytes, tag.
std::array<std::uint8_t, kRecordHead> head_of(std::size_t n_bytes) {
  std::array<std::uint8_t, kRecordHead> head;
  for (std::size_t i = 0; i < head.size(); ++i) head[i] = static_cast<std::uint8_t>(n_bytes >> 8 * i);
  return head;
}

}  // namespace

void RecordCipher::Free::operator()(evp_cipher_ctx_st* context) const {
  EVP_CIPHER_CTX_free(context);
}

RecordCipher::RecordCipher(const DirectionKey& key, Direction direction, std::uint64_t records_per_key)
    : key_(key), direction_(direction), records_per_key_(records_per_key), context_(EVP_CIPHER_CTX_new()) {
  use_key();
}

void RecordCipher::use_key() {
  const int sealing = direction_ == Direction::kSeal ? 1 : 0;
  if (!context_ ||
      EVP_CipherInit_ex(context_.get(), EVP_aes_256_gcm(), nullptr, key_.key.data(), nullptr, sealing) != 1) {
    fail("AES-256-GCM cannot be set up");
  }
  number_ = 0;
}

// After records_per_key records, well below the number at which GCM with one key becomes weak. Both sides
// count, so no message announces it; the old key is overwritten and cannot be derived from the new one.
// The iv stays: under a new key its numbers are new.
void RecordCipher::next_key() {
  key_.key =
      internal::hmac(key_.key, {reinterpret_cast<const std::uint8_t*>(kNextLabel.data()), kNextLabel.size()});
  use_key();
}

bool RecordCipher::run(std::span<const std::uint8_t, kRecordHead> head, std::span<const std::uint8_t> in,
                       std::uint8_t* out, std::uint8_t* tag) {
  // After fork() both processes would continue with the same numbers, and GCM breaks when one is used twice.
  if (!made_here_) {
    base::raise(ErrorKind::kUsage, "this connection belongs to the parent of this process",
                ErrorFamily::kNetwork);
  }
  if (number_ == records_per_key_) next_key();
  // The iv combined with the number of the record, as TLS 1.3 does: never used twice under one key, and a
  // record that is dropped, repeated or reordered fails to open, since the other side counts too.
  auto nonce = key_.iv;
  for (std::size_t i = 0; i < 8; ++i) nonce[i + 4] ^= static_cast<std::uint8_t>(number_ >> 8 * i);
  ++number_;
  EVP_CIPHER_CTX* context = context_.get();
  int n = 0;
  const bool good = EVP_CipherInit_ex(context, nullptr, nullptr, nullptr, nonce.data(), -1) == 1 &&
                    EVP_CipherUpdate(context, nullptr, &n, head.data(), kRecordHead) == 1 &&
                    EVP_CipherUpdate(context, out, &n, in.data(), static_cast<int>(in.size())) == 1;
  if (!good) fail("AES-256-GCM failed");
  if (direction_ == Direction::kOpen) {
    return EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, kRecordTag, tag) == 1 &&
           EVP_CipherFinal_ex(context, out + in.size(), &n) == 1;
  }
  if (EVP_CipherFinal_ex(context, out + in.size(), &n) != 1 ||
      EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, kRecordTag, tag) != 1) {
    fail("AES-256-GCM failed");
  }
  return true;
}

// The length in front is authenticated with the record (additional data), so that it cannot be changed
// either.
void Sealer::seal(std::span<const std::uint8_t> plain, Bytes& out) {
  while (!plain.empty()) {
    const auto part = plain.first(std::min(plain.size(), kMaxRecord));
    plain = plain.subspan(part.size());
    const auto head = head_of(part.size());
    const std::size_t at = out.size();
    out.resize(at + kRecordHead + part.size() + kRecordTag);
    std::uint8_t* to = std::ranges::copy(head, out.data() + at).out;
    cipher_.run(head, part, to, to + part.size());
  }
}

// Of the record that begins with `head`; 0 when there is none of that length.
std::size_t Opener::whole_size(std::span<const std::uint8_t> head) {
  std::uint32_t n_bytes = 0;
  for (std::size_t i = 0; i < kRecordHead; ++i) n_bytes |= static_cast<std::uint32_t>(head[i]) << 8 * i;
  failed_ = failed_ || n_bytes == 0 || n_bytes > kMaxRecord;
  return failed_ ? 0 : kRecordHead + n_bytes + kRecordTag;
}

std::optional<std::span<const std::uint8_t>> Opener::open(std::span<const std::uint8_t> record) {
  // Nothing of it is shown before its tag was compared.
  thread_local std::array<std::uint8_t, kMaxRecord> plain;
  const auto sealed = record.subspan(kRecordHead, record.size() - kRecordHead - kRecordTag);
  std::array<std::uint8_t, kRecordTag> tag;
  std::ranges::copy(record.last<kRecordTag>(), tag.begin());
  failed_ = !cipher_.run(record.first<kRecordHead>(), sealed, plain.data(), tag.data());
  if (failed_) return std::nullopt;
  return std::span<const std::uint8_t>(plain).first(sealed.size());
}

// Takes bytes from the front of `bytes` until one record is complete. Three results: a record; nothing and
// `bytes` empty, more is needed; nothing and failed(), for ever. The span is valid until the next record is
// opened on this thread.
std::optional<std::span<const std::uint8_t>> Opener::next(std::span<const std::uint8_t>& bytes) {
  if (failed_) return std::nullopt;
  if (held_.empty() && bytes.size() >= kRecordHead) {
    // The usual case: opened in place.
    const std::size_t whole = whole_size(bytes);
    if (failed_) return std::nullopt;
    if (bytes.size() >= whole) {
      const auto record = bytes.first(whole);
      bytes = bytes.subspan(whole);
      return open(record);
    }
  }
  const auto take = [&](std::size_t up_to) {
    const std::size_t n = std::min(bytes.size(), up_to - held_.size());
    held_.insert(held_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
    bytes = bytes.subspan(n);
    return held_.size() == up_to;
  };
  if (held_.size() < kRecordHead && !take(kRecordHead)) return std::nullopt;
  const std::size_t whole = whole_size(held_);
  if (failed_ || !take(whole)) return std::nullopt;
  const auto plain = open(held_);
  // A quiet connection keeps no room for the largest record.
  if (held_.capacity() > kMaxRecord / 8) held_ = Bytes();
  held_.clear();
  return plain;
}

}  // namespace lockstep::net
