// The kinds of message between agents. A request's answer has the same kind with kAnswer set, or is
// kException. Numbers never change: they are on the wire (docs/wire.md).
// Thread safety: constants only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::rpc {

enum class MessageKind : std::uint8_t {
  kCall = 1,            // a registered function, or an ATen operator: rpc_sync, rpc_async
  kRemoteCall = 3,      // as kCall, the result stays there behind an RRef
  kRRefFetch = 8,       // to_here
  kRRefDelete = 9,      // a user of an RRef is gone
  kRRefFork = 10,       // a user notifies the owner of its fork
  kRRefChild = 11,      // a child notifies its parent that the owner knows it
  kBackward = 16,       // gradients for a send node
  kBackwardPlan = 17,   // SMART mode: which send nodes a pass will reach
  kCleanup = 18,        // release an autograd context
  kContextHeld = 19,    // to the owner of an autograd context: notify me when it is released
  kBackwardDone = 20,   // a worker's part of a pass has completed, or failed
  kBackwardAbort = 21,  // the pass failed elsewhere
  kGather = 32,         // all-gather and barrier among workers
  kLeave = 33,          // shutdown: the sender enters a round, or pings
  kGatherMissing = 34,  // who has not arrived at a gathering
};
inline constexpr std::uint8_t kAnswer = 0x80;
inline constexpr std::uint8_t kException = 0xFF;
inline constexpr std::size_t kMaxKinds = 64;

}  // namespace lockstep::rpc
