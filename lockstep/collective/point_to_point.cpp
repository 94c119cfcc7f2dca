#include "lockstep/collective/point_to_point.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/collective/internal/packing.h"

namespace lockstep {
namespace {

using internal::CollectiveCall;
using internal::HeldTensors;

void check_tag(const CollectiveCall& call, int tag) {
  if (tag < 0) call.refuse(ErrorKind::kUsage, "tag is ", tag, "; tags are not negative");
}

// Only for the blocking calls: a rank can post isend and irecv to itself and wait for both
// (group/internal/loopback.h).
void check_other(const CollectiveCall& call, int peer, const char* role) {
  if (peer != call.rank()) return;
  call.refuse(ErrorKind::kUsage, role,
              " is this rank itself, for which a blocking call would wait forever; use ",
              role[0] == 'd' ? "isend" : "irecv");
}

// The peer, after every check of a send.
int check_send(CollectiveCall& call, const at::Tensor& tensor, const SendOptions& options) {
  call.check(tensor, "tensor");
  call.describe(tensor);
  // describe() comes after check(), which finds the part of the group that the tensor's device belongs to;
  // the same holds below.
  check_tag(call, options.tag);
  return call.root(options.dst, options.group_dst, "dst");
}

// The peer or -1 for any, after every check of a receive.
int check_recv(CollectiveCall& call, const at::Tensor& tensor, const RecvOptions& options) {
  call.check_output(tensor, "tensor");
  call.describe(tensor);
  check_tag(call, options.tag);
  const bool any = !options.src && !options.group_src;
  return any ? -1 : call.root(options.src, options.group_src, "src");
}

Work start_send(CollectiveCall& call, const at::Tensor& tensor, int peer, int tag) {
  // The element type is compared by the receiving engine: sender and receiver must both come to the same wire
  // type, so it depends only on the dtype and the engine.
  const auto wire = call.wire_for_move(tensor.scalar_type());
  call.op().kind = LOCKSTEP_SEND;
  call.op().root = peer;
  // The user's tag is matched as it is. For collectives the group overwrites this field with the sequence
  // number, for messages it does not (GroupBase::number).
  call.op().tag = tag;
  return call.start(internal::plain(tensor), {}, tensor.numel(), wire, {.results = {tensor}});
}

Work start_recv(CollectiveCall& call, const at::Tensor& tensor, int peer, int tag) {
  const auto wire = call.wire_for_move(tensor.scalar_type());
  call.op().kind = LOCKSTEP_RECV;
  call.op().root = peer;
  call.op().tag = tag;
  HeldTensors held;
  // A receive into a tensor with gaps goes through a temporary that is copied back only when the message has
  // arrived whole.
  const auto recv = room_for(tensor, false, held);
  return call.start({}, recv, tensor.numel(), wire, std::move(held));
}

OpType recv_type(const RecvOptions& options) {
  return options.src || options.group_src ? OpType::kRecv : OpType::kRecvAnySource;
}

SendOptions send_options(const P2POp& op, const BatchOptions& options) {
  return {.dst = op.peer,
          .group_dst = op.group_peer,
          .tag = op.tag,
          .group = op.group,
          .timeout = options.timeout,
          .where = options.where};
}

RecvOptions recv_options(const P2POp& op, const BatchOptions& options) {
  return {.src = op.peer,
          .group_src = op.group_peer,
          .tag = op.tag,
          .group = op.group,
          .timeout = options.timeout,
          .where = options.where};
}

// Everything that could be wrong with one of a batch, before any is started. False: not a member.
bool check_batched(const P2POp& op, const BatchOptions& options) {
  if (op.op == P2PKind::kIsend) {
    const auto one = send_options(op, options);
    // Used for its checks only and never started. A refused message takes no sequence number, so the
    // collectives after it are numbered as on the other ranks.
    CollectiveCall call(OpType::kSend, one, true);
    if (!call.takes_part()) return false;
    check_send(call, op.tensor, one);
    return true;
  }
  const auto one = recv_options(op, options);
  CollectiveCall call(OpType::kRecv, one, true);
  if (op.op != P2PKind::kIrecv) {
    call.refuse(ErrorKind::kUsage, "a P2POp has the op ", static_cast<int>(op.op),
                "; only kIsend and kIrecv exist");
  }
  if (!call.takes_part()) return false;
  if (!op.peer && !op.group_peer) call.refuse(ErrorKind::kUsage, "a P2POp has neither peer nor group_peer");
  check_recv(call, op.tensor, one);
  return true;
}

}  // namespace

void send(at::Tensor tensor, SendOptions options) {
  CollectiveCall call(OpType::kSend, options, false);
  if (!call.takes_part()) return;
  const int peer = check_send(call, tensor, options);
  check_other(call, peer, "dst");
  start_send(call, tensor, peer, options.tag);
}

Work isend(at::Tensor tensor, SendOptions options) {
  CollectiveCall call(OpType::kSend, options, true);
  if (!call.takes_part()) return {};
  return start_send(call, tensor, check_send(call, tensor, options), options.tag);
}

std::optional<int> recv(at::Tensor tensor, RecvOptions options) {
  CollectiveCall call(recv_type(options), options, false);
  if (!call.takes_part()) return std::nullopt;
  const int peer = check_recv(call, tensor, options);
  check_other(call, peer, "src");
  return start_recv(call, tensor, peer, options.tag).source_rank();
}

Work irecv(at::Tensor tensor, RecvOptions options) {
  CollectiveCall call(recv_type(options), options, true);
  if (!call.takes_part()) return {};
  return start_recv(call, tensor, check_recv(call, tensor, options), options.tag);
}

std::vector<Work> batch_isend_irecv(std::vector<P2POp> ops, BatchOptions options) {
  const Group group = ops.empty() ? nullptr : ops.front().group;
  // Group handles are compared as given: null and an explicit default group count as different.
  for (const auto& op : ops) {
    if (op.group == group) continue;
    base::raise(ErrorKind::kUsage,
                base::cat("batch_isend_irecv (called at ", options.where.file_name(), ":",
                          options.where.line(), "): the messages name different groups; all must be of one"));
  }
  if (ops.empty()) {
    base::raise(ErrorKind::kUsage,
                base::cat("batch_isend_irecv (called at ", options.where.file_name(), ":",
                          options.where.line(), "): the list is empty; at least one message is needed"));
  }
  // All or nothing as far as arguments are concerned: a peer would wait for a message of a batch that was
  // refused half-way.
  for (const auto& op : ops) {
    if (!check_batched(op, options)) return {};
  }
  // Not one transaction: if a later one cannot be started because the group broke meanwhile, the earlier ones
  // keep their tensors until they end.
  std::vector<Work> works;
  for (const auto& op : ops) {
    works.push_back(op.op == P2PKind::kIsend ? isend(op.tensor, send_options(op, options))
                                             : irecv(op.tensor, recv_options(op, options)));
  }
  return works;
}

}  // namespace lockstep
