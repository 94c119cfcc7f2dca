#include "lockstep/rpc/detail/rref_scope.h"

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::rpc::internal {
namespace {

// Encoding and decoding of an argument happen deep inside codecs that know nothing of RPC; the scope is how
// an RRef among the fields finds its message. Scopes nest, since encoding may run user code that calls.
thread_local SendScope* sending = nullptr;
thread_local ReceiveScope* receiving = nullptr;

// The forks of one message. Sent: the receivers account for them. Not sent, for whatever reason: they end
// here.
class Shared final : public SendGuard {
 public:
  Shared(std::shared_ptr<RRefManager> manager, std::vector<RRefOnWire> refs)
      : manager_(std::move(manager)), refs_(std::move(refs)) {}
  ~Shared() override {
    if (!sent_) manager_->unshare(refs_);
  }
  void sent() noexcept override { sent_ = true; }

 private:
  const std::shared_ptr<RRefManager> manager_;
  const std::vector<RRefOnWire> refs_;
  bool sent_ = false;
};

// Where the list of RRefs is in a message, by its kind.
std::span<const std::uint8_t> list_in(const transport::Message& message) {
  const auto body = message.body.bytes;
  switch (message.kind) {
    case static_cast<std::uint8_t>(MessageKind::kCall):
      return read_call_head(body).rrefs;
    case static_cast<std::uint8_t>(MessageKind::kRemoteCall):
      if (body.size() < kRemoteHead) return {};
      return read_call_head(body.subspan(kRemoteHead)).rrefs;
    case static_cast<std::uint8_t>(MessageKind::kCall) | kAnswer:
    case static_cast<std::uint8_t>(MessageKind::kRRefFetch) | kAnswer:
      return read_value_head(body).rrefs;
    default:
      return {};
  }
}

}  // namespace

SendScope::SendScope(Agent& agent, WorkerId to) : agent_(agent), to_(to), outer_(sending) {
  sending = this;
}

// Not empty only when guard() was not called: encoding failed.
SendScope::~SendScope() {
  sending = outer_;
  if (!refs_.empty()) manager_->unshare(refs_);
}

std::uint32_t SendScope::add(const RRefState& state) {
  if (sending == nullptr) {
    base::raise(
        ErrorKind::kUsage,
        "an RRef can be sent as an argument or a result of an RPC and in no other way: its owner must know "
        "who has it");
  }
  auto& scope = *sending;
  if (scope.manager_ == nullptr) scope.manager_ = rref_manager(scope.agent_).shared_from_this();
  if (state.manager != scope.manager_) {
    base::raise(ErrorKind::kUsage, state.text() + " belongs to another RPC agent than the one that sends it");
  }
  scope.refs_.push_back(scope.manager_->share(state, scope.to_));
  return scope.count() - 1;
}

Bytes SendScope::list() const {
  if (refs_.empty()) return {};
  base::ByteWriter writer;
  for (const auto& ref : refs_) writer.put(ref.rref).put(ref.fork).put(ref.owner);
  return writer.take();
}

// From here on the message owns the forks.
std::shared_ptr<SendGuard> SendScope::guard() {
  if (refs_.empty()) return nullptr;
  auto guard = std::make_shared<Shared>(manager_, refs_);
  refs_.clear();
  return guard;
}

ReceiveScope::ReceiveScope(Agent& agent, WorkerId from, std::span<const std::uint8_t> list)
    : agent_(agent), outer_(receiving) {
  if (list.size() % kRRefOnWireBytes != 0)
    base::raise(ErrorKind::kUsage, "a message's list of RRefs is damaged");
  if (!list.empty()) {
    auto& manager = rref_manager(agent);
    base::ByteReader reader(list);
    states_.reserve(list.size() / kRRefOnWireBytes);
    // All entries, also those that no argument uses: each is a fork that its sender has registered.
    while (const auto rref = reader.get<std::uint64_t>()) {
      const auto fork = reader.get<std::uint64_t>();
      const auto owner = reader.get<WorkerId>();
      states_.push_back(manager.receive({.rref = *rref, .fork = *fork, .owner = *owner}, from));
    }
  }
  receiving = this;
}

ReceiveScope::~ReceiveScope() {
  receiving = outer_;
}

ReceiveScope& ReceiveScope::here() {
  if (receiving == nullptr)
    base::raise(ErrorKind::kUsage, "an RRef can be received as an argument or a result of an RPC only");
  return *receiving;
}

RRefManager& ReceiveScope::manager() {
  return rref_manager(here().agent_);
}

// The number came in the message: checked. Several arguments may name the same entry.
std::shared_ptr<RRefState> ReceiveScope::get(std::uint32_t place) {
  const auto& states = here().states_;
  if (place >= states.size())
    base::raise(ErrorKind::kUsage, base::cat("a message names RRef ", place, " of ", states.size()));
  return states[place];
}

// Of a message that nobody will decode, such as an answer after its call's timeout: its forks exist and must
// end.
void discard_rrefs(Agent& agent, WorkerId from, const transport::Message& message) noexcept {
  try {
    const auto list = list_in(message);
    if (list.empty()) return;
    // Elsewhere: a value may end with its last handle, and this thread may be waiting for something else.
    agent.run([weak = agent.weak_from_this(), from, copy = Bytes(list.begin(), list.end())] {
      try {
        if (const auto alive = weak.lock()) const ReceiveScope scope(*alive, from, copy);
      } catch (...) {
        base::log(LogLevel::kWarn, "a message that nobody waited for: " + base::current_failure().message);
      }
    });
  } catch (...) {
    base::log(LogLevel::kWarn, "a message that nobody waited for: " + base::current_failure().message);
  }
}

}  // namespace lockstep::rpc::internal
