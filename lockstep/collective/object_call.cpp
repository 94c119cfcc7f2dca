#include "lockstep/collective/detail/object_call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/collective/point_to_point.h"
#include "lockstep/group/detail/group_base.h"

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

// What is announced of a part: its size, or -1 less its size when it tells why there is none.
std::int64_t announced(const Bytes& part, bool failed) {
  return failed ? -1 - size_of(part) : size_of(part);
}
std::int64_t length_of(std::int64_t announcement) {
  return announcement < 0 ? -1 - announcement : announcement;
}
Sizes lengths_of(Sizes announcements) {
  std::ranges::transform(announcements, announcements.begin(), length_of);
  return announcements;
}

// Sizes, then the bytes one after the other: what a list is when it is sent.
Bytes joined(const std::vector<Bytes>& objects) {
  base::ByteWriter all;
  for (const auto& object : objects) all.put(size_of(object));
  for (const auto& object : objects) all.raw(object);
  return all.take();
}

// One announcement per part: all parts of a failed list carry the same reason.
Sizes announced(const EncodedObjects& objects) {
  Sizes sizes;
  for (const auto& part : objects.parts) sizes.push_back(announced(part, objects.failed));
  return sizes;
}

Bytes concatenated(const std::vector<Bytes>& objects) {
  base::ByteWriter all;
  for (const auto& object : objects) all.raw(object);
  return all.take();
}

// The same of a list that could not be encoded: why.
Bytes on_the_line(const EncodedObjects& objects) {
  return objects.failed ? objects.parts.front() : joined(objects.parts);
}

std::span<const std::uint8_t> bytes_of(const at::Tensor& buffer) {
  return {buffer.const_data_ptr<std::uint8_t>(), static_cast<std::size_t>(buffer.numel())};
}

// Cuts what joined() made. False when the sizes are not those of the bytes.
bool cut_list(ReceivedObjects& received, std::size_t n) {
  auto rest = bytes_of(received.buffer);
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
      deadline_(Deadline::after(timeout.value_or(group_->timeout()))),
      where_(where) {
  // After the members are set, since called() names the group and the line. One deadline for all steps of the
  // call: each gets what left() says.
  if (timeout) base::checked_timeout(*timeout, called());
}

std::string ObjectCall::called() const {
  char where[kWhereCapacity];
  write_where(where_, where);
  return base::cat(name_, " of group \"", group_->name(), "\" (rank ", rank(), " of ", size(), ", called at ",
                   where, ")");
}

std::string ObjectCall::prefix() const {
  return called() + ": ";
}

bool ObjectCall::takes_part() const {
  if (rank() >= 0) return true;
  base::log(LogLevel::kWarn,
            base::cat(prefix(), "this process is not a member of the group; nothing was done"));
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
    refuse(ErrorKind::kUsage, role, " must be empty here: rank ", root, " of the group is the root");
  }
}

int ObjectCall::root(std::optional<int> in_world, std::optional<int> in_group, const char* role,
                     std::optional<int> fallback) const {
  std::string why;
  const int found = find_root(*resolve(group_), {in_world, in_group, role, fallback}, why);
  if (found < 0) refuse(ErrorKind::kUsage, why);
  return found;
}

int ObjectCall::peer(std::optional<int> in_world, std::optional<int> in_group, const char* role) const {
  const int peer = root(in_world, in_group, role, {});
  if (peer == rank()) refuse(ErrorKind::kUsage, role, " is this rank itself; it would wait forever");
  return peer;
}

std::optional<int> ObjectCall::peer_or_any(std::optional<int> in_world, std::optional<int> in_group,
                                           const char* role) const {
  if (!in_world && !in_group) return std::nullopt;
  return peer(in_world, in_group, role);
}

Milliseconds ObjectCall::left() const {
  return base::time_left(deadline_);
}

void ObjectCall::refuse_object(const Error& error, std::size_t index, int from) const {
  Failure failure = error.failure();
  const auto whose = from < 0 ? base::cat("the object of rank ", world_rank(static_cast<int>(index)))
                              : base::cat("object ", index, " of rank ", world_rank(from));
  failure.message = base::cat(prefix(), whose, ": ", failure.message);
  base::raise(std::move(failure));
}

// Byte 0 is the ErrorKind, the rest the message; refuse_failed() reads it back on every receiver.
EncodedObjects ObjectCall::why_not_encoded(std::size_t n_parts) {
  const Failure failure = base::current_failure();
  base::ByteWriter encoded;
  encoded.put(static_cast<std::uint8_t>(failure.kind));
  encoded.raw(to_bytes(failure.message));
  return {.parts = std::vector<Bytes>(n_parts, encoded.take()), .failed = true};
}

void ObjectCall::refuse_failed(int from, std::span<const std::uint8_t> encoded) const {
  // A peer sent the byte, so it is checked before it becomes an ErrorKind.
  auto kind = ErrorKind::kInternal;
  if (!encoded.empty() && encoded.front() <= static_cast<std::uint8_t>(ErrorKind::kInternal))
    kind = static_cast<ErrorKind>(encoded.front());
  refuse(kind, "rank ", world_rank(from), from == rank() ? " (this one)" : "",
         " could not encode its object: ", encoded.empty() ? "" : to_text(encoded.subspan(1)));
}

void ObjectCall::check_count(std::int64_t came, std::size_t expected, int from) const {
  if (came != static_cast<std::int64_t>(expected)) {
    refuse(ErrorKind::kUsage, "object_list has ", expected, " entries here, rank ", world_rank(from),
           " sent ", came, "; the lists must have one length");
  }
}

// What a peer announces is believed up to here, all parts of a call together. Guards against an allocation by
// a damaged or hostile announcement, of which no byte has arrived yet.
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

// Sizes first, then bytes. A rank whose object cannot be encoded takes part in both steps with its error in
// place of the object (a negative size), so that all ranks fail with the reason instead of waiting for it.
ReceivedObjects ObjectCall::all_gather(const EncodedObjects& object) {
  Sizes own = announced(object);
  Sizes sizes(static_cast<std::size_t>(size()));
  lockstep::all_gather_into_tensor(tensor_over(sizes), tensor_over(own), step(AllGatherOptions{}));
  const Sizes lengths = lengths_of(sizes);
  auto received = room_for(lengths);
  lockstep::all_gather(received.buffer.split_with_sizes(lengths), tensor_over(object.parts.front()),
                       step(AllGatherOptions{}));
  check_encoded(received, sizes);
  return received;
}

ReceivedObjects ObjectCall::gather(const EncodedObjects& object, int dst) {
  Sizes own = announced(object);
  const bool here = rank() == dst;
  Sizes sizes(here ? static_cast<std::size_t>(size()) : 0);
  auto slots = here ? tensor_over(sizes).split(1) : std::vector<at::Tensor>();
  lockstep::gather(tensor_over(own), std::move(slots), step(GatherOptions{.group_dst = dst}));
  const Sizes lengths = lengths_of(sizes);
  auto received = room_for(lengths);
  // An all-to-all in which only one rank receives: sizes differ, which gather does not allow.
  Sizes incoming(static_cast<std::size_t>(size()), 0);
  if (here) incoming = lengths;
  Sizes outgoing(static_cast<std::size_t>(size()), 0);
  const Bytes& bytes = object.parts.front();
  outgoing[static_cast<std::size_t>(dst)] = size_of(bytes);
  lockstep::all_to_all_single(
      received.buffer, tensor_over(bytes),
      step(AllToAllSingleOptions{.output_split_sizes = incoming, .input_split_sizes = outgoing}));
  // Only now: this rank has done its part in both steps, and dst raises the same reason.
  if (object.failed) refuse_failed(rank(), bytes);
  check_encoded(received, sizes);
  return received;
}

// As gather, the other way: an all-to-all in which only one rank sends.
ReceivedObjects ObjectCall::scatter(const EncodedObjects& objects, int src) {
  const bool here = rank() == src;
  Sizes outgoing = announced(objects);
  auto slots = here ? tensor_over(outgoing).split(1) : std::vector<at::Tensor>();
  Sizes own = {0};
  lockstep::scatter(tensor_over(own), std::move(slots), step(ScatterOptions{.group_src = src}));
  const Sizes length = lengths_of(own);
  auto received = room_for(length);
  outgoing = lengths_of(std::move(outgoing));
  // Empty on all ranks but src, which announced one part per rank.
  outgoing.resize(static_cast<std::size_t>(size()), 0);
  Sizes incoming(static_cast<std::size_t>(size()), 0);
  incoming[static_cast<std::size_t>(src)] = length.front();
  const Bytes all = concatenated(objects.parts);
  lockstep::all_to_all_single(
      received.buffer, tensor_over(all),
      step(AllToAllSingleOptions{.output_split_sizes = incoming, .input_split_sizes = outgoing}));
  if (own.front() < 0) refuse_failed(src, received.parts.front());
  return received;
}

ReceivedObjects ObjectCall::broadcast(const EncodedObjects& objects, int src) {
  const bool here = rank() == src;
  const Bytes all = here ? on_the_line(objects) : Bytes();
  Sizes head = {static_cast<std::int64_t>(objects.parts.size()), announced(all, objects.failed)};
  lockstep::broadcast(tensor_over(head), step(BroadcastOptions{.group_src = src}));
  auto received = here ? ReceivedObjects{.buffer = tensor_over(all), .parts = {}} : room_for_list(head);
  received.from = src;
  lockstep::broadcast(received.buffer, step(BroadcastOptions{.group_src = src}));
  // Taken part in to the end, so that the others go on.
  if (here && !objects.failed) return {};
  cut(received, head, objects.parts.size());
  return received;
}

void ObjectCall::send(const EncodedObjects& objects, int dst, bool use_batch) {
  const Bytes all = on_the_line(objects);
  Sizes head = {static_cast<std::int64_t>(objects.parts.size()), announced(all, objects.failed)};
  // Two messages under one tag: the engine delivers messages of equal sender, receiver and tag in order, so
  // the head comes first.
  send_tensor(tensor_over(head), dst, use_batch);
  send_tensor(tensor_over(all), dst, use_batch);
  if (objects.failed) refuse_failed(rank(), all);
}

ReceivedObjects ObjectCall::receive(std::size_t n, std::optional<int> src, bool use_batch) {
  Sizes head = {0, 0};
  const int from = receive_tensor(tensor_over(head), src, use_batch);
  auto received = room_for_list(head);
  received.from = from;
  // From the sender of the head, also when any source was asked for: another sender's head may be next in the
  // queue.
  receive_tensor(received.buffer, from, use_batch);
  cut(received, head, n);
  return received;
}

ReceivedObjects ObjectCall::room_for_list(std::span<const std::int64_t> head) const {
  const std::int64_t length[] = {length_of(head.back())};
  auto received = room_for(length);
  received.parts.clear();
  return received;
}

void ObjectCall::cut(ReceivedObjects& received, std::span<const std::int64_t> head, std::size_t n) const {
  if (head.back() < 0) refuse_failed(received.from, bytes_of(received.buffer));
  check_count(head.front(), n, received.from);
  if (!cut_list(received, n)) refuse(ErrorKind::kInternal, "the sizes and the bytes do not agree");
}

void ObjectCall::check_encoded(const ReceivedObjects& received, std::span<const std::int64_t> sizes) const {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0) refuse_failed(static_cast<int>(i), received.parts[i]);
  }
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
  const auto from = lockstep::recv(tensor, step(RecvOptions{.group_src = src}));
  // recv() returns a rank of the world; the rest of this class counts in ranks of the group.
  return root(from, {}, "src", {});
}

}  // namespace lockstep::internal
