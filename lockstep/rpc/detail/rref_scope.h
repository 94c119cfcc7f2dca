// RRefs inside messages. A message lists the RRefs it carries before its values, and a value names one by its
// index in the list. So a receiver registers all of them before it decodes anything, and those that are never
// decoded (another type was expected, the caller has given up) are released as any handle is.
//
// The codec of RRef finds the scopes by the thread: outside a message there is none, and an RRef cannot be
// encoded.
// Thread safety: a scope belongs to the thread that opened it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/rpc/detail/rref_manager.h"
#include "lockstep/transport/message.h"

namespace lockstep::rpc::internal {

// Values are encoded for `to` in this thread while it lives.
class SendScope {
 public:
  SendScope(Agent& agent, WorkerId to);
  // Takes back what was shared, unless guard() was called.
  ~SendScope();
  SendScope(const SendScope&) = delete;
  SendScope& operator=(const SendScope&) = delete;

  // The place of `state` in the list. Raises kUsage when no scope is open, and what the RRef's creation
  // failed with.
  static std::uint32_t add(const RRefState& state);
  std::uint32_t count() const { return static_cast<std::uint32_t>(refs_.size()); }
  Bytes list() const;
  // Takes back what was shared if the message is not sent. Null when there is nothing.
  std::shared_ptr<SendGuard> guard();

 private:
  Agent& agent_;
  const WorkerId to_;
  SendScope* const outer_;
  std::shared_ptr<RRefManager> manager_;
  std::vector<RRefOnWire> refs_;
};

inline constexpr std::size_t kRRefOnWireBytes = 18;

// Values that came from `from` are decoded in this thread while it lives.
class ReceiveScope {
 public:
  // Registers the list; raises kUsage for a damaged one.
  ReceiveScope(Agent& agent, WorkerId from, std::span<const std::uint8_t> list);
  ~ReceiveScope();
  ReceiveScope(const ReceiveScope&) = delete;
  ReceiveScope& operator=(const ReceiveScope&) = delete;

  // The RRef at `place`. Raises kUsage when no scope is open, and for a place that is not in the list.
  static std::shared_ptr<RRefState> get(std::uint32_t place);
  static RRefManager& manager();

 private:
  static ReceiveScope& here();
  Agent& agent_;
  ReceiveScope* const outer_;
  std::vector<std::shared_ptr<RRefState>> states_;
};

// Registers and releases the RRefs in a message that nobody will decode.
void discard_rrefs(Agent& agent, WorkerId from, const transport::Message& message) noexcept;

}  // namespace lockstep::rpc::internal
