// Feeds bytes to everything a transport decodes: the first byte says what. Addresses and greetings of both
// sides, TCP frames cut into reads, and a ring whose every byte, numbers included, a sender has written.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "lockstep/transport/internal/frame.h"
#include "lockstep/transport/internal/greeting.h"
#include "lockstep/transport/internal/record.h"
#include "lockstep/transport/internal/ring.h"
#include "lockstep/transport/internal/tcp_link.h"

namespace {

using namespace lockstep;
using namespace lockstep::transport;
using namespace lockstep::transport::internal;
using Input = std::span<const std::uint8_t>;

constexpr std::uint64_t kLimit = 1 << 16;

void check(bool condition) {
  if (!condition) std::abort();
}

// Every byte of it can be read, and it is no larger than was allowed.
void read_all(const Message& message) {
  check(size_of(message) <= kLimit);
  static std::uint8_t copy[kLimit];
  const auto read = [](const object::Blob& blob) {
    if (!blob.bytes.empty()) std::memcpy(copy, blob.bytes.data(), blob.bytes.size());
  };
  read(message.body);
  std::ranges::for_each(message.blobs, read);
}

void address(Input input) {
  const auto endpoint = decode_endpoint(input);
  if (endpoint) check(decode_endpoint(encode_endpoint(*endpoint)) == endpoint);
}

void greetings(Input input, bool with_secret) {
  static const JobSecret secret = JobSecret::mint();
  const std::optional<JobSecret> known = with_secret ? std::optional(secret) : std::nullopt;
  const net::Binding binding{.purpose = net::Purpose::kTransportTcp, .server = "me"};
  GreetingServer server(known, binding);
  GreetingClient client(known, {.id = 1, .token = "you", .to = "me"}, binding);
  GreetingReader reader;
  // A client that says the first thing right gets further.
  if (!input.empty() && (input[0] & 1) != 0) server.next(client.first());
  while (!input.empty()) {
    check(reader.wanted() > 0);
    const auto part = input.first(std::min(reader.wanted(), input.size()));
    input = input.subspan(part.size());
    const auto message = reader.feed(part);
    if (reader.broken()) return;
    if (!message) continue;
    const auto step = server.next(*message);
    check(!(with_secret && step.intro));
    client.next(*message);
  }
}

void frames(Input input) {
  if (input.empty()) return;
  const std::size_t step = 1 + input[0];
  input = input.subspan(1);
  FrameDecoder decoder(kLimit);
  while (!input.empty()) {
    auto part = input.first(std::min(step, input.size()));
    const auto direct = decoder.direct();
    if (!direct.empty()) {
      part = part.first(std::min(part.size(), direct.size()));
      std::ranges::copy(part, direct.begin());
      decoder.filled(part.size());
    } else if (!decoder.feed(part)) {
      check(!decoder.error().empty());
      return;
    }
    input = input.subspan(part.size());
    std::ranges::for_each(decoder.messages(), read_all);
    decoder.messages().clear();
  }
}

// The input is the tail, the ring's bytes, and the beginning of the sender's heap.
void ring(Input input) {
  constexpr std::size_t kCapacity = 512, kHeapBytes = 4096;
  static const Mapping heap = std::make_shared<net::Segment>(net::Segment::create("fuzz", kHeapBytes));
  std::uint64_t tail = 0;
  if (input.size() < sizeof tail) return;
  std::memcpy(&tail, input.data(), sizeof tail);
  input = input.subspan(sizeof tail);
  // Often one that can be.
  if (tail % 4 != 0) tail = tail % (kCapacity / kLine + 1) * kLine;
  RingControl control{};
  control.tail = tail;
  alignas(kLine) std::uint8_t data[kCapacity] = {};
  std::memcpy(data, input.data(), std::min(input.size(), kCapacity));
  input = input.subspan(std::min(input.size(), kCapacity));
  std::memset(heap->data(), 0, kHeapBytes);
  std::memcpy(heap->data(), input.data(), std::min(input.size(), kHeapBytes));
  RingReader reader({.control = &control, .data = data, .capacity = kCapacity});
  const Sender sender{.heap = heap, .max_message_bytes = kLimit};
  for (int records = 0;; ++records) {
    check(records <= static_cast<int>(kCapacity / kLine));
    const std::uint64_t n_bytes = reader.next(kMinRecord, kMaxRingRecord);
    if (n_bytes == 0) break;
    const Buffer record(n_bytes);
    reader.take(record.data(), n_bytes);
    const auto decoded = decode_record(record, n_bytes, sender);
    check(decoded.message.has_value() == decoded.error.empty());
    if (!decoded.message) break;
    read_all(*decoded.message);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const Input rest(data + 1, size - 1);
  // Seldom those that compute proofs: handshake_fuzz is about them.
  const int what = data[0] % 16;
  if (what < 2) {
    address(rest);
  } else if (what < 5) {
    greetings(rest, what == 4);
  } else if (what < 10) {
    frames(rest);
  } else {
    ring(rest);
  }
  return 0;
}
