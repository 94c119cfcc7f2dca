#include "lockstep/autograd/internal/messages.h"

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::autograd::internal {
namespace {

constexpr std::uint8_t kRetainGraph = 1;
constexpr std::uint8_t kFast = 2;

}  // namespace

void raise_damaged() {
  base::raise(ErrorKind::kUsage, "this is not a message of a backward pass: it is damaged");
}

// The beginning of every message of a pass: whichever arrives first, it is known which pass it belongs to and
// how that runs.
void PassHead::write(base::ByteWriter& writer) const {
  const auto flags = static_cast<std::uint8_t>((retain_graph ? kRetainGraph : 0) | (fast ? kFast : 0));
  writer.put(context).put(pass).put(origin).put(flags).put(timeout_ms);
}

base::ByteWriter with_head(const PassHead& head) {
  base::ByteWriter writer;
  head.write(writer);
  return writer;
}

PassHead PassHead::read(base::ByteReader& reader) {
  PassHead head;
  head.context = need(reader.get<std::uint64_t>());
  head.pass = need(reader.get<std::uint64_t>());
  head.origin = need(reader.get<WorkerId>());
  const auto flags = need(reader.get<std::uint8_t>());
  head.timeout_ms = need(reader.get<std::int64_t>());
  // Input from another worker: unknown flags are refused, not ignored.
  if (flags > (kRetainGraph | kFast) || head.timeout_ms < 0 || head.context == 0) raise_damaged();
  head.retain_graph = (flags & kRetainGraph) != 0;
  head.fast = (flags & kFast) != 0;
  return head;
}

// A failure that came over RPC is unwrapped: the worker is named once, by the pass, however many workers
// passed it on.
NodeFailure NodeFailure::of(WorkerId worker, const rpc::CallFailure& failure) {
  NodeFailure result{.worker = worker, .failure = failure.failure, .type = failure.type};
  if (failure.remote) {
    result.failure.message = failure.remote->text;
    result.type = failure.remote->type;
  }
  return result;
}

void NodeFailure::write(base::ByteWriter& writer) const {
  writer.put(worker).raw(rpc::encode_failure({.failure = failure, .type = type}));
}

// The worker is where the failure happened, not who passed it on.
NodeFailure NodeFailure::read(base::ByteReader& reader) {
  const auto worker = need(reader.get<WorkerId>());
  return of(worker, rpc::decode_failure({.id = worker, .name = {}}, need(reader.raw(reader.left()))));
}

void NodeFailure::raise(const std::string& name, bool remote) const {
  Failure named = failure;
  named.message = base::cat("Error on Node ", worker, ": ", failure.message, " (", name, ", ", type, ")");
  if (!remote || failure.kind == ErrorKind::kPeerLost || failure.kind == ErrorKind::kTimeout) {
    lockstep::base::raise(std::move(named));
  }
  throw rpc::RemoteError(
      std::move(named),
      {.worker = {.id = worker, .name = name}, .type = type, .text = failure.message, .trace = {}});
}

void write_messages(base::ByteWriter& writer, std::span<const std::uint64_t> messages) {
  writer.put(static_cast<std::uint32_t>(messages.size()));
  for (const auto message : messages) writer.put(message);
}

std::vector<std::uint64_t> read_messages(base::ByteReader& reader) {
  const auto n = need(reader.get<std::uint32_t>());
  // Before memory is allocated for a number that a peer sent.
  if (n > reader.left() / sizeof(std::uint64_t)) raise_damaged();
  std::vector<std::uint64_t> messages(n);
  for (auto& message : messages) message = need(reader.get<std::uint64_t>());
  return messages;
}

void write_plan_requests(base::ByteWriter& writer, const PlanRequests& requests) {
  writer.put(static_cast<std::uint32_t>(requests.size()));
  for (const auto& [worker, messages] : requests) {
    writer.put(worker);
    write_messages(writer, messages);
  }
}

PlanRequests read_plan_requests(base::ByteReader& reader) {
  PlanRequests requests;
  for (auto n = need(reader.get<std::uint32_t>()); n > 0; --n) {
    const auto worker = need(reader.get<WorkerId>());
    auto messages = read_messages(reader);
    if (!requests.emplace(worker, std::move(messages)).second) raise_damaged();
  }
  return requests;
}

void write_workers(base::ByteWriter& writer, const std::vector<WorkerId>& workers) {
  writer.put(static_cast<std::uint32_t>(workers.size()));
  for (const auto worker : workers) writer.put(worker);
}

std::vector<WorkerId> read_workers(base::ByteReader& reader) {
  const auto n = need(reader.get<std::uint32_t>());
  if (n > reader.left() / sizeof(WorkerId)) raise_damaged();
  std::vector<WorkerId> workers(n);
  for (auto& worker : workers) worker = need(reader.get<WorkerId>());
  return workers;
}

}  // namespace lockstep::autograd::internal
