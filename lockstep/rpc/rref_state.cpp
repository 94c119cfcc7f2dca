// What an RRef refers to: the value at its owner, and the state that the copies of one handle share.
#include <memory>
#include <string>
#include <utility>

#include "lockstep/base/detail/demangle.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/rpc/detail/rref_manager.h"

namespace lockstep::rpc {

using internal::RRefOnWire;

// acquire: with the release in set().
std::shared_ptr<void> OwnedValue::get(const std::type_info& wanted) const {
  if (const auto* failure = promise.state()->failure()) failure->raise();
  const ValueType* its_type = type.load(std::memory_order_acquire);
  if (its_type != nullptr && *its_type->type != wanted) {
    base::raise(ErrorKind::kUsage, base::cat("this RRef holds ", base::demangle(its_type->type->name()),
                                             ", not ", base::demangle(wanted.name())));
  }
  return promise.state()->value();
}

// losses_before: a worker that comes back under the same number is not the owner any more. The count tells.
RRefState::RRefState(std::shared_ptr<RRefManager> manager_, RRefOnWire ref_, WorkerInfo owner_,
                     std::shared_ptr<OwnedValue> value_)
    : manager(std::move(manager_)),
      ref(ref_),
      owner(std::move(owner_)),
      value(std::move(value_)),
      losses_before(value ? 0 : manager->losses(owner.id).n) {}

RRefState::~RRefState() {
  if (ref.fork != 0) manager->drop(ref.fork);
}

bool RRefState::confirmed() const {
  return is_owner() || manager->confirmed(ref.fork);
}

void RRefState::check() const {
  if (created && created->state()->over()) {
    if (const auto* failure = created->state()->failure()) failure->raise();
  }
  const auto agent = manager->agent();
  if (is_owner() || !agent || agent->closed()) return;  // the next step raises that RPC was shut down
  const auto losses = manager->losses(owner.id);
  if (losses.n == losses_before) return;
  base::raise({.kind = ErrorKind::kPeerLost,
               .message = base::cat(text(), ": worker ", owner.name, " (number ", owner.id,
                                    ") is gone: ", losses.cause),
               .peer = LostPeer{.rank = owner.id, .cause = losses.cause}});
}

Future<void> RRefState::creation() const {
  if (created) return created->future();
  if (!value) {
    base::raise(ErrorKind::kUsage,
                text() +
                    " was passed on to this worker: only the worker that called remote(), and "
                    "the owner, know when it is made");
  }
  Promise<void> promise(value->promise.state()->helper());
  value->promise.state()->on_over([state = value->promise.state(), promise] {
    if (const auto* failure = state->failure()) {
      promise.fail(*failure);
    } else {
      promise.set();
    }
  });
  return promise.future();
}

std::string RRefState::text() const {
  return base::cat("RRef ", ref.rref, " of ", owner.name);
}

}  // namespace lockstep::rpc
