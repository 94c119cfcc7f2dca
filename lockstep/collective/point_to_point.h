// Messages between two ranks of a group. A send matches the receive with the same sender, receiver and tag;
// messages with equal ones arrive in the order sent, and they wait for their peer only, never for a
// collective. Both sides name the same type and number of elements, otherwise both raise kUsage. Any strides;
// complex numbers are sent as pairs. The tensor must not be changed before the Work has completed.
//
// dst and src are ranks in the world, group_dst and group_src ranks in the group; give one of the two. Tags
// are not negative. Errors as in collectives.h: a peer that does not exist is kUsage. On a process that is
// not a member: a warning, nothing is sent or received. send and recv to oneself would block forever and are
// refused; isend and irecv to oneself are allowed.
// Thread safety: every function may be called from any thread; messages with the same peer and tag match in
// the order in which they are started, so threads that share both must agree on that order.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <source_location>
#include <vector>

#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace lockstep {

struct SendOptions {
  std::optional<int> dst{};  // one of the two is required
  std::optional<int> group_dst{};
  int tag = 0;
  Group group{};
  std::optional<Milliseconds> timeout{};  // as in collectives.h
  std::source_location where = std::source_location::current();
};
// Returns when the tensor may be reused.
void send(at::Tensor tensor, SendOptions options);
// Returns immediately. The Work has no future (get_future raises kUsage).
Work isend(at::Tensor tensor, SendOptions options);

struct RecvOptions {
  std::optional<int> src{};  // neither: from any rank
  std::optional<int> group_src{};
  int tag = 0;
  Group group{};
  std::optional<Milliseconds> timeout{};  // as in collectives.h
  std::source_location where = std::source_location::current();
};
// Returns the sender's rank in the world when the message is in `tensor`; nothing on a process that is
// not a member.
std::optional<int> recv(at::Tensor tensor, RecvOptions options = {});
// Returns immediately; Work::source_rank gives the sender. The Work has no future.
Work irecv(at::Tensor tensor, RecvOptions options = {});

enum class P2PKind { kIsend, kIrecv };

// One message of a batch.
struct P2POp {
  P2PKind op;
  at::Tensor tensor;
  std::optional<int> peer{};  // rank in the world; required, or group_peer
  std::optional<int> group_peer{};
  Group group{};  // the same for the whole batch
  int tag = 0;
};

struct BatchOptions {
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Starts all of them, in the order given, and returns their Works; all complete in whatever order the peers
// start theirs. Every message is checked before the first is started. Raises kUsage for an empty list and for
// one that names two groups.
std::vector<Work> batch_isend_irecv(std::vector<P2POp> ops, BatchOptions options = {});

}  // namespace lockstep
