// The bytes a TcpStore client and server exchange: torch's TCPStore protocol and, from 0x40 on, requests of
// ours that only our server knows. docs/wire.md has the grammar. Integers are little-endian.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::internal {

enum class Query : std::uint8_t {
  kValidate = 0,  // uint32 magic; no reply
  kSet,           // key, value; no reply
  kCompareSet,    // key, expected, desired -> value
  kGet,           // key -> value; the key must exist
  kAdd,           // key, int64 -> int64
  kCheck,         // keys -> CheckReply
  kWait,          // keys -> WaitReply when all exist
  kNumKeys,       // -> int64
  kDeleteKey,     // key -> int64, how many were removed
  kAppend,        // key, value; no reply
  kMultiGet,      // keys -> values; all must exist
  kMultiSet,      // count, (key, value)*; no reply
  kCancelWait,    // -> WaitReply::kCanceled
  kPing,          // uint32 -> the same
  kQueuePush,     // key, value; no reply
  kQueuePop,      // key -> uint64 0, or uint64 1 and the value
  kQueueLen,      // key -> int64
  kListKeys,      // -> count, key*
  kTorchEnd,      // one past torch's last

  // Ours. All reply with a Status first; those that wait are ended by kCancelWait.
  kOursBegin = 0x40,
  kWaitExist = kOursBegin,  // keys -> status when all exist; unlike kWait one queue entry wakes every waiter
  kGetWait,                 // keys -> status, values when all exist: get and multi_get in one round trip
  kQueuePopWait,            // key -> status, value when there is an entry
  kAddChecked,              // key, int64 -> status, int64
  kLocalName,               // -> status, name of the server's local socket, identity of its host
  kOursEnd,
};

enum class CheckReply : std::uint8_t { kReady = 0, kNotReady = 1 };
enum class WaitReply : std::uint8_t { kStopWaiting = 0, kCanceled = 1 };
// kDone and kCanceled are WaitReply's numbers; kRefused is followed by the reason as text.
enum class Status : std::uint8_t { kDone = 0, kCanceled = 1, kRefused = 2 };

inline constexpr std::uint32_t kValidationMagic = 0x3C85F7CE;
inline constexpr std::string_view kKeyPrefix = "/";
inline constexpr std::string_view kInitKey = "init/";

// How our client finds out that the server is ours, in the ping every client sends anyway. torch pings with
// its process id (below 2^22) and is echoed; a ping with these upper bits is answered with all bits turned
// over by our server and echoed by torch's.
inline constexpr std::uint32_t kOurPing = 0xC10C0000;
inline constexpr std::uint32_t kOurPingMask = 0xFFFF0000;
constexpr std::uint32_t pong(std::uint32_t ping) {
  return (ping & kOurPingMask) == kOurPing ? ~ping : ping;
}

}  // namespace lockstep::internal
