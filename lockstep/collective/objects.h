// Collectives on C++ values: anything that lockstep/object/object.h can encode, tensors included. For lists
// whose entries differ in type use std::variant, or Object and its as<T>().
//
// Names, arguments and defaults are torch.distributed's. All of them block. Every member calls the same one
// with the same root; the values may differ in size and, with Object, in type. Only data is decoded, no code:
// when a peer sends another type than the receiver names, the receiver raises kUsage saying what was received
// and where in the value, and the group stays usable. Outputs are assigned only when everything was decoded.
// A literal, like everything that converts to std::string_view, is sent and received as std::string; lists of
// literals may be written in braces.
// Thread safety: every function may be called from any thread, but calls on one group must not overlap on a
// rank, since each consists of several operations.
// Errors: kUsage for bad arguments (before anything is sent), kUnsupported for a value that cannot be sent,
// and those of collectives.h. A value that one rank cannot encode is the same error on every rank that was to
// receive it, naming that rank, and the group stays usable. On a process that is not a member: a warning,
// lists are left unchanged.
//
// The tail every options struct has:
//   group    null: the default group
//   device   of the transferred bytes; unset or the CPU (only where torch has this argument)
//   timeout  for the whole call; unset: the group's; kNoTimeout: none; zero and negative ones raise kUsage
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <source_location>
#include <string>
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
std::vector<internal::SentAs<T>> gather_object(const T& obj, GatherObjectOptions options = {}) {
  internal::ObjectCall call("gather_object", options);
  if (!call.takes_part()) return {};
  const int dst = call.root(options.dst, options.group_dst, "dst", 0);
  const auto gathered = call.gather(call.encode_one<T>(obj), dst);
  if (call.rank() != dst) return {};
  return call.decode_each<internal::SentAs<T>>(gathered);
}

struct BroadcastObjectListOptions {
  std::optional<int> src{};  // rank in the world; neither: 0
  std::optional<int> group_src{};
  Group group{};
  std::optional<c10::Device> device{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// The objects of `src` replace those of all other ranks. The lists must have the same length on all ranks; a
// rank whose list has another length raises kUsage.
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
// Returns entry r of the list of `src` on rank r. The list has one entry per rank on `src` and is empty
// elsewhere. Returns a value-initialised T on a process that is not a member.
template <class T = std::string>
internal::SentAs<T> scatter_object_list(const std::vector<T>& object_list,
                                        ScatterObjectListOptions options = {}) {
  internal::ObjectCall call("scatter_object_list", options);
  if (!call.takes_part()) return {};
  const int src = call.root(options.src, options.group_src, "src", 0);
  call.check_list_at(src, "object_list", object_list);
  internal::EncodedObjects encoded;
  if (call.rank() == src) encoded = call.encode_each(object_list);
  return std::move(call.decode_each<internal::SentAs<T>>(call.scatter(encoded, src), src).front());
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
// To the recv_object_list of another rank. The list must not be empty.
template <class T = std::string>
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
// Replaces the entries by those of a send_object_list of the same length; returns the sender's rank in the
// world, nothing on a process that is not a member. A list of another length is received, discarded and
// raises kUsage.
template <class T>
std::optional<int> recv_object_list(std::vector<T>& object_list, RecvObjectListOptions options = {}) {
  internal::ObjectCall call("recv_object_list", options);
  if (!call.takes_part()) return std::nullopt;
  call.check_not_empty(object_list.size(), "object_list");
  const auto src = call.peer_or_any(options.src, options.group_src, "src");
  const auto received = call.receive(object_list.size(), src, options.use_batch);
  object_list = call.decode_each<T>(received, received.from);
  return call.world_rank(received.from);
}

}  // namespace lockstep
