#include "lockstep/group/object_call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "lockstep/base/log.h"
#include "lockstep/group/collectives.h"
#include "lockstep/group/internal/group_base.h"
#include "lockstep/group/point_to_point.h"

namespace lockstep::internal {
namespace {

using Sizes = std::vector<std::int64_t>;

// Borrowed, not copied: the operations on them are over before the call returns.
at::Tensor tensor_over(Sizes& numbers) {
  return at::from_blob(numbers.data(), {static_cast<std::int64_t>(numbers.size())}, at::kLong);
}
at::Tensor tensor_over(const Bytes& bytes) {
  return at::from_blob(const_cast<std::uint8_t*>(bytes.data()), {static_cast<std::int64_t>(bytes.size())},
                       at::kByte);
}

std::int64_t size_of(const Bytes& bytes) {
  return static_cast<std::int64_t>(bytes.size());
}

// Sizes, then the bytes one after the other: what a list is on the line.
Bytes joined(const std::vector<Bytes>& objects) {
  ByteWriter all;
  for (const auto& object : objects) all.put(size_of(object));
  for (const auto& object : objects) all.raw(object);
  return all.take();
}

Sizes part_sizes(const std::vector<Bytes>& objects) {
  Sizes sizes;
  for (const auto& object : objects) sizes.push_back(size_of(object));
  return sizes;
}

Bytes concatenated(const std::vector<Bytes>& objects) {
  ByteWriter all;
  for (const auto& object : objects) all.raw(object);
  return all.take();
}

// Cuts what joined() made. False when the sizes are not those of the bytes.
bool cut(ReceivedObjects& received, std::size_t n) {
  std::span<const std::uint8_t> rest(received.buffer.const_data_ptr<std::uint8_t>(),
                                     static_cast<std::size_t>(received.buffer.numel()));
  if (rest.size() / sizeof(std::int64_t) < n) return false;
  Sizes sizes(n);
  if (n > 0) std::memcpy(sizes.data(), rest.data(), n * sizeof(std::int64_t));
  rest = rest.subspan(n * sizeof(std::int64_t));
  for (const auto size : sizes) {
    if (size < 0 || static_cast<std::uint64_t>(size) > rest.size()) return false;
    received.parts.push_back(rest.first(static_cast<std::size_t>(size)));
    rest = rest.subspan(static_cast<std::size_t>(size));
  }
  return rest.empty();
}

}  // namespace

ObjectCall::ObjectCall(const char* name, const Group& group, std::optional<Milliseconds> timeout,
                       std::source_location where)
    : name_(name),
      group_(resolve(group)),
      deadline_(Deadline::after(group_->rank() < 0 ? Milliseconds(0) : timeout.value_or(group_->timeout()))),
      where_(where) {}

std::string ObjectCall::prefix() const {
  char where[kWhereCapacity];
  write_where(where_, where);
  return cat(name_, " of group \"", group_->name(), "\" (rank ", rank(), " of ", size(), ", called at ",
             where, "): ");
}

bool ObjectCall::takes_part() const {
  if (rank() >= 0) return true;
  log(LogLevel::kWarn, cat(prefix(), "this process is not a member of the group; nothing was done"));
  return false;
}

int ObjectCall::world_rank(int rank) const {
  return group_->ranks()[static_cast<std::size_t>(rank)];
}

void ObjectCall::check_device(const std::optional<c10::Device>& device) const {
  if (device && !device->is_cpu()) {
    refuse(ErrorKind::kUnsupported, "device is ", device->str(), "; objects travel through CPU memory");
  }
}

void ObjectCall::check_length(std::size_t n, const char* role) const {
  if (n != static_cast<std::size_t>(size())) {
    refuse(ErrorKind::kUsage, role, " has ", n, " entries; it needs ", size(), ", one per rank of the group");
  }
}

void ObjectCall::check_not_empty(std::size_t n, const char* role) const {
  if (n == 0) refuse(ErrorKind::kUsage, role, " is empty; it needs at least one entry");
}

void ObjectCall::check_presence(int root, const char* role, bool given) const {
  if (rank() == root && !given) refuse(ErrorKind::kUsage, role, " is required on this rank, the root");
  if (rank() != root && given) {
    refuse(ErrorKind::kUsage, role, " must be null here: rank ", root, " of the group is the root");
  }
}

int ObjectCall::root(std::optional<int> in_world, std::optional<int> in_group, const char* role,
                     std::optional<int> fallback) const {
  if (in_world && in_group) refuse(ErrorKind::kUsage, "give ", role, " or group_", role, ", not both");
  if (in_group) {
    if (*in_group < 0 || *in_group >= size()) {
      refuse(ErrorKind::kUsage, "group_", role, " is ", *in_group, ", ranks of this group are 0 to ",
             size() - 1);
    }
    return *in_group;
  }
  if (!in_world) in_world = fallback;
  if (!in_world) refuse(ErrorKind::kUsage, "give ", role, " or group_", role);
  const auto& ranks = group_->ranks();
  const auto found = std::ranges::find(ranks, *in_world);
  if (found == ranks.end())
    refuse(ErrorKind::kUsage, role, " is ", *in_world, ", which is no member of this group");
  return static_cast<int>(found - ranks.begin());
}

int ObjectCall::peer(std::optional<int> in_world, std::optional<int> in_group, const char* role) const {
  const int peer = root(in_world, in_group, role, {});
  if (peer == rank()) refuse(ErrorKind::kUsage, role, " is this rank itself; it would wait for ever");
  return peer;
}

std::optional<int> ObjectCall::peer_or_any(std::optional<int> in_world, std::optional<int> in_group,
                                           const char* role) const {
  if (!in_world && !in_group) return std::nullopt;
  return peer(in_world, in_group, role);
}

Milliseconds ObjectCall::left() const {
  if (deadline_.is_never()) return Milliseconds(0);
  return std::max(Milliseconds(1), std::chrono::duration_cast<Milliseconds>(deadline_.remaining()));
}

void ObjectCall::refuse_object(const Error& error, std::size_t index, int from) const {
  Failure failure = error.failure();
  const auto whose = from < 0 ? cat("the object of rank ", world_rank(static_cast<int>(index)))
                              : cat("object ", index, " of rank ", world_rank(from));
  failure.message = cat(prefix(), whose, ": ", failure.message);
  raise(std::move(failure));
}

void ObjectCall::check_count(std::int64_t came, std::size_t expected, int from) const {
  if (came != static_cast<std::int64_t>(expected)) {
    refuse(ErrorKind::kUsage, "object_list has ", expected, " entries here, rank ", world_rank(from),
           " sent ", came, "; the lists must have one length");
  }
}

// What a peer announces is believed up to here, all parts of a call together.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 34;

// One buffer, cut into parts of these sizes.
ReceivedObjects ObjectCall::room_for(std::span<const std::int64_t> sizes) const {
  std::int64_t total = 0;
  for (const auto size : sizes) {
    if (size < 0 || size > kMostBytes || (total += size) > kMostBytes)
      refuse(ErrorKind::kResource, "a rank announced an object of ", size, " bytes; at most ", kMostBytes,
             " travel in one call");
  }
  ReceivedObjects received{.buffer = at::empty({total}, at::kByte), .parts = {}};
  const auto* next = received.buffer.const_data_ptr<std::uint8_t>();
  for (const auto size : sizes) {
    received.parts.emplace_back(next, static_cast<std::size_t>(size));
    next += size;
  }
  return received;
}

ReceivedObjects ObjectCall::all_gather(const Bytes& object) {
  Sizes own = {size_of(object)};
  Sizes sizes(static_cast<std::size_t>(size()));
  lockstep::all_gather_into_tensor(tensor_over(sizes), tensor_over(own), step(AllGatherOptions{}));
  auto received = room_for(sizes);
  lockstep::all_gather(received.buffer.split_with_sizes(sizes), tensor_over(object),
                       step(AllGatherOptions{}));
  return received;
}

ReceivedObjects ObjectCall::gather(const Bytes& object, int dst) {
  Sizes own = {size_of(object)};
  const bool here = rank() == dst;
  Sizes sizes(here ? static_cast<std::size_t>(size()) : 0);
  auto slots = here ? tensor_over(sizes).split(1) : std::vector<at::Tensor>();
  lockstep::gather(tensor_over(own), std::move(slots), step(GatherOptions{.group_dst = dst}));
  auto received = room_for(sizes);
  // An all-to-all in which only one rank receives: sizes differ, which gather does not allow.
  Sizes incoming(static_cast<std::size_t>(size()), 0);
  if (here) incoming = sizes;
  Sizes outgoing(static_cast<std::size_t>(size()), 0);
  outgoing[static_cast<std::size_t>(dst)] = own.front();
  lockstep::all_to_all_single(
      received.buffer, tensor_over(object),
      step(AllToAllSingleOptions{.output_split_sizes = incoming, .input_split_sizes = outgoing}));
  return received;
}

ReceivedObjects ObjectCall::scatter(const std::vector<Bytes>& objects, int src) {
  const bool here = rank() == src;
  Sizes outgoing = part_sizes(objects);
  auto slots = here ? tensor_over(outgoing).split(1) : std::vector<at::Tensor>();
  Sizes own = {0};
  lockstep::scatter(tensor_over(own), std::move(slots), step(ScatterOptions{.group_src = src}));
  auto received = room_for(own);
  outgoing.resize(static_cast<std::size_t>(size()), 0);
  Sizes incoming(static_cast<std::size_t>(size()), 0);
  incoming[static_cast<std::size_t>(src)] = own.front();
  const Bytes all = concatenated(objects);
  lockstep::all_to_all_single(
      received.buffer, tensor_over(all),
      step(AllToAllSingleOptions{.output_split_sizes = incoming, .input_split_sizes = outgoing}));
  return received;
}

ReceivedObjects ObjectCall::broadcast(const std::vector<Bytes>& objects, int src) {
  const bool here = rank() == src;
  const Bytes all = here ? joined(objects) : Bytes();
  Sizes head = {static_cast<std::int64_t>(objects.size()), size_of(all)};
  lockstep::broadcast(tensor_over(head), step(BroadcastOptions{.group_src = src}));
  auto received =
      here ? ReceivedObjects{.buffer = tensor_over(all), .parts = {}} : room_for(std::span(head).last(1));
  received.parts.clear();
  lockstep::broadcast(received.buffer, step(BroadcastOptions{.group_src = src}));
  if (here) return {};
  // Taken part in to the end, so that the others go on.
  check_count(head.front(), objects.size(), src);
  if (!cut(received, objects.size())) refuse(ErrorKind::kInternal, "the sizes and the bytes do not agree");
  received.from = src;
  return received;
}

void ObjectCall::send(const std::vector<Bytes>& objects, int dst, bool use_batch) {
  const Bytes all = joined(objects);
  Sizes head = {static_cast<std::int64_t>(objects.size()), size_of(all)};
  send_tensor(tensor_over(head), dst, use_batch);
  send_tensor(tensor_over(all), dst, use_batch);
}

ReceivedObjects ObjectCall::receive(std::size_t n, std::optional<int> src, bool use_batch) {
  Sizes head = {0, 0};
  const int from = receive_tensor(tensor_over(head), src, use_batch);
  auto received = room_for(std::span(head).last(1));
  received.parts.clear();
  received.from = from;
  receive_tensor(received.buffer, from, use_batch);
  check_count(head.front(), n, from);
  if (!cut(received, n)) refuse(ErrorKind::kInternal, "the sizes and the bytes do not agree");
  return received;
}

void ObjectCall::send_tensor(const at::Tensor& tensor, int dst, bool use_batch) {
  if (!use_batch) return lockstep::send(tensor, step(SendOptions{.group_dst = dst}));
  const auto works =
      batch_isend_irecv({{.op = P2PKind::kIsend, .tensor = tensor, .group_peer = dst, .group = group_}},
                        {.timeout = left(), .where = where_});
  for (const auto& work : works) work.wait();
}

// The sender's rank in the group.
int ObjectCall::receive_tensor(const at::Tensor& tensor, std::optional<int> src, bool use_batch) {
  if (use_batch && src) {
    const auto works =
        batch_isend_irecv({{.op = P2PKind::kIrecv, .tensor = tensor, .group_peer = *src, .group = group_}},
                          {.timeout = left(), .where = where_});
    for (const auto& work : works) work.wait();
    return *src;
  }
  const int from = lockstep::recv(tensor, step(RecvOptions{.group_src = src}));
  return root(from, {}, "src", {});
}

}  // namespace lockstep::internal
