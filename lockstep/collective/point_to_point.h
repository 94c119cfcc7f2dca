// Messages between two ranks of a group. A message goes to the receive of the same sender, receiver and tag; equal ones
// arrive in the order sent, and they wait for their peer only, never for a collective. Both sides name the same type and
// number of elements, else both get kUsage. Any strides; complex numbers travel as pairs. The tensor must not be changed
// before the Work is over.
//
// dst and src are ranks in the world, group_dst and group_src ranks in the group; give one of the two. Tags are not
// negative. Errors as in collectives.h: a peer that does not exist is kUsage. Not members: a warning, nothing happens.
// send and recv to oneself would wait for ever and are refused; isend and irecv may.
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
  std::optional<Milliseconds> timeout{};  // unset: the group's
  std::source_location where = std::source_location::current();
};
// Returns when the tensor may be used again.
void send(at::Tensor tensor, SendOptions options);
// Returns at once. The Work has no future (get_future raises kUsage).
Work isend(at::Tensor tensor, SendOptions options);

struct RecvOptions {
  std::optional<int> src{};  // neither: from any rank
  std::optional<int> group_src{};
  int tag = 0;
  Group group{};
  std::optional<Milliseconds> timeout{};  // unset: the group's
  std::source_location where = std::source_location::current();
};
// Returns the sender's rank in the world when the message is in `tensor`; -1 for a process that is not a member.
int recv(at::Tensor tensor, RecvOptions options = {});
// Returns at once; Work::source_rank tells the sender. The Work has no future.
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
// Starts all of them, in the order given, and returns their Works; whatever order the peers chose, all come through.
// Every message is checked before the first is started. Raises kUsage for an empty list and for one with two groups.
std::vector<Work> batch_isend_irecv(std::vector<P2POp> ops, BatchOptions options = {});

}  // namespace lockstep
