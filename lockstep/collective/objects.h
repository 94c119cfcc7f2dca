// Collectives on C++ values: anything that lockstep/object/object.h can encode, tensors included. For lists whose
// entries differ in type use std::variant, or Object and its as<T>().
//
// Names, arguments and defaults are torch.distributed's. All of them block. Every member calls the same one with the same
// root; the values may differ in size and, with Object, in type. Only data is decoded, no code: a peer that sends
// another type than the receiver names is a kUsage error that says what came and where in the value, and the group
// goes on. Outputs are assigned only when everything was decoded.
// Errors: kUsage for bad arguments (before anything is sent), kUnsupported for a value that cannot be sent, and those of
// collectives.h. A value that one rank cannot encode is the same error on every rank that was to get it, naming that
// rank, and the group goes on. Not members: a warning, lists stay as they are.
//
// The tail every options struct has:
//   group    null: the default group
//   device   where the bytes travel; unset or the CPU (lists that torch gives one)
//   timeout  for the whole call; unset: the group's
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <source_location>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/collective/detail/object_call.h"
#include "lockstep/group/process_group.h"
#include "lockstep/tensor/tensor_object.h"

namespace lockstep {

struct AllGatherObjectOptions {
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// object_list[r] becomes rank r's `obj`. The list has one entry per rank of the group.
template <class T>
void all_gather_object(std::vector<T>& object_list, const std::type_identity_t<T>& obj,
                       AllGatherObjectOptions options = {}) {
  internal::ObjectCall call("all_gather_object", options);
  if (!call.takes_part()) return;
  call.check_length(object_list.size(), "object_list");
  object_list = call.decode_each<T>(call.all_gather(call.encode_one<T>(obj)));
}

struct GatherObjectOptions {
  std::optional<int> dst{};  // rank in the world; neither: 0
  std::optional<int> group_dst{};
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// On `dst`: every rank's `obj`, in the order of ranks. Elsewhere an empty list.
template <class T>
std::vector<T> gather_object(const T& obj, GatherObjectOptions options = {}) {
  internal::ObjectCall call("gather_object", options);
  if (!call.takes_part()) return {};
  const int dst = call.root(options.dst, options.group_dst, "dst", 0);
  const auto gathered = call.gather(call.encode_one<T>(obj), dst);
  if (call.rank() != dst) return {};
  return call.decode_each<T>(gathered);
}

struct BroadcastObjectListOptions {
  std::optional<int> src{};  // rank in the world; neither: 0
  std::optional<int> group_src{};
  Group group{};
  std::optional<c10::Device> device{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// `src`'s objects replace everyone's. The lists have one length on all ranks; another one is told where it is wrong.
template <class T>
void broadcast_object_list(std::vector<T>& object_list, BroadcastObjectListOptions options = {}) {
  internal::ObjectCall call("broadcast_object_list", options);
  if (!call.takes_part()) return;
  const int src = call.root(options.src, options.group_src, "src", 0);
  internal::EncodedObjects encoded{.parts = std::vector<Bytes>(object_list.size())};
  if (call.rank() == src) encoded = call.encode_each(object_list);
  const auto received = call.broadcast(encoded, src);
  if (call.rank() != src) object_list = call.decode_each<T>(received, src);
}

struct ScatterObjectListOptions {
  std::optional<int> src{};  // rank in the world; neither: 0
  std::optional<int> group_src{};
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Entry r of `src`'s list on rank r. The list has one entry per rank on `src` and is empty elsewhere. A value-initialised T
// for a process that is not a member.
template <class T>
T scatter_object_list(const std::vector<T>& object_list, ScatterObjectListOptions options = {}) {
  internal::ObjectCall call("scatter_object_list", options);
  if (!call.takes_part()) return T{};
  const int src = call.root(options.src, options.group_src, "src", 0);
  call.check_list_at(src, "object_list", object_list);
  internal::EncodedObjects encoded;
  if (call.rank() == src) encoded = call.encode_each(object_list);
  return std::move(call.decode_each<T>(call.scatter(encoded, src), src).front());
}

struct SendObjectListOptions {
  std::optional<int> dst{};  // rank in the world; one of the two is required
  std::optional<int> group_dst{};
  Group group{};
  std::optional<c10::Device> device{};
  bool use_batch = false;  // through batch_isend_irecv
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// To the recv_object_list of another rank. The list is not empty.
template <class T>
void send_object_list(const std::vector<T>& object_list, SendObjectListOptions options) {
  internal::ObjectCall call("send_object_list", options);
  if (!call.takes_part()) return;
  call.check_not_empty(object_list.size(), "object_list");
  const int dst = call.peer(options.dst, options.group_dst, "dst");
  call.send(call.encode_each(object_list), dst, options.use_batch);
}

struct RecvObjectListOptions {
  std::optional<int> src{};  // rank in the world; neither: from any rank
  std::optional<int> group_src{};
  Group group{};
  std::optional<c10::Device> device{};
  bool use_batch = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Replaces the entries by those of a send_object_list of as many; returns the sender's rank in the world, -1 for a
// process that is not a member. A list of another length is taken off the line and refused.
template <class T>
int recv_object_list(std::vector<T>& object_list, RecvObjectListOptions options = {}) {
  internal::ObjectCall call("recv_object_list", options);
  if (!call.takes_part()) return -1;
  call.check_not_empty(object_list.size(), "object_list");
  const auto src = call.peer_or_any(options.src, options.group_src, "src");
  const auto received = call.receive(object_list.size(), src, options.use_batch);
  object_list = call.decode_each<T>(received, received.from);
  return call.world_rank(received.from);
}

}  // namespace lockstep
