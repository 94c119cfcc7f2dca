// TCP frames, greetings and addresses: what is encoded comes back however the bytes are cut, and nonsense is
// refused before memory is taken for it.
#include "lockstep/transport/internal/frame.h"

#include <gtest/gtest.h>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/transport/internal/greeting.h"
#include "lockstep/transport/internal/record.h"
#include "lockstep/transport/internal/tcp_link.h"
#include "lockstep/transport/transport_contract.h"

namespace lockstep::transport::internal {
namespace {

constexpr std::uint64_t kLimit = 1 << 20;

Bytes wire_of(const Message& message) {
  base::ByteWriter out;
  out.raw(encode_frame_head(message)).raw(message.body.bytes);
  for (const auto& blob : message.blobs) out.raw(blob.bytes);
  return out.take();
}

TEST(Frame, MessagesComeBackHoweverTheStreamIsCut) {
  const std::vector<std::vector<std::size_t>> lists = {{}, {0}, {5, 0, 70'000}, {100, 200}};
  base::ByteWriter stream;
  std::uint64_t id = 0;
  for (const auto& list : lists) {
    ++id;
    stream.raw(wire_of(message_of(id, 20 * id, list)));
  }
  for (const std::size_t step : {1u, 7u, 32u, 1000u, 65'536u, 1'000'000u}) {
    FrameDecoder decoder(kLimit);
    std::span<const std::uint8_t> rest = stream.view();
    while (!rest.empty()) {
      const auto part = rest.first(std::min(step, rest.size()));
      // Large pieces go where they belong, as a connection reads them.
      if (const auto direct = decoder.direct(); !direct.empty()) {
        const std::size_t n = std::min(direct.size(), part.size());
        std::copy_n(part.begin(), n, direct.begin());
        decoder.filled(n);
        rest = rest.subspan(n);
        continue;
      }
      ASSERT_TRUE(decoder.feed(part)) << decoder.error();
      rest = rest.subspan(part.size());
    }
    EXPECT_TRUE(decoder.between_frames());
    ASSERT_EQ(decoder.messages().size(), lists.size()) << step;
    for (std::size_t i = 0; i < lists.size(); ++i) {
      EXPECT_TRUE(is_message(decoder.messages()[i], i + 1, 20 * (i + 1), lists[i])) << step;
      for (const auto& blob : decoder.messages()[i].blobs) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blob.bytes.data()) % kLine, 0u);
        EXPECT_TRUE(blob.yours);
      }
    }
  }
}

TEST(Frame, BytesThatAreNotAFrameAreRejectedWithAReason) {
  FrameHead head{.magic = kFrameMagic};
  const auto refused = [](const FrameHead& bad, std::span<const std::uint64_t> sizes) {
    FrameDecoder decoder(kLimit);
    base::ByteWriter out;
    out.put(bad);
    for (const std::uint64_t size : sizes) out.put(size);
    EXPECT_FALSE(decoder.feed(out.view()));
    EXPECT_FALSE(decoder.feed(out.view())) << "once broken, it stays so";
    return decoder.error();
  };
  EXPECT_NE(refused({}, {}).find("not a lockstep message"), std::string::npos);
  head.body_bytes = kLimit + 1;
  EXPECT_NE(refused(head, {}).find("limit"), std::string::npos);
  head.body_bytes = 10;
  head.n_blobs = 2;
  EXPECT_NE(refused(head, std::array<std::uint64_t, 2>{kLimit - 5, 0}).find("limit"), std::string::npos);
  EXPECT_NE(refused(head, std::array<std::uint64_t, 2>{~std::uint64_t{0}, 2}).find("limit"),
            std::string::npos);
  head.n_blobs = kMaxParts;
  EXPECT_NE(refused(head, {}).find("pieces"), std::string::npos);
}

TEST(Endpoint, ComesBackAndNothingElseIsOne) {
  const Endpoint endpoint{
      .host = "boot.1.2", .token = "lockstep-transport-x", .tcp_host = "::1", .tcp_port = 4711, .pid = 12};
  const Bytes bytes = encode_endpoint(endpoint);
  EXPECT_EQ(decode_endpoint(bytes), endpoint);
  for (std::size_t n = 0; n < bytes.size(); ++n)
    EXPECT_FALSE(decode_endpoint(std::span(bytes).first(n))) << n;
  Bytes longer = bytes;
  longer.push_back(0);
  EXPECT_FALSE(decode_endpoint(longer));
  EXPECT_FALSE(decode_endpoint(encode_endpoint({.host = "h", .token = ""}))) << "no name";
  EXPECT_FALSE(decode_endpoint(encode_endpoint({.token = std::string(200, 'x')}))) << "no name of a socket";
  EXPECT_FALSE(decode_endpoint(encode_endpoint({.token = "t", .tcp_host = "::1", .tcp_port = 0})));
}

net::Binding to_callee(const std::string& token) {
  return {.purpose = net::Purpose::kTransportLocal, .server = token};
}

struct Met {
  std::optional<Intro> intro;
  std::string refused_by_server, refused_by_client;
};

Met meet(const std::optional<JobSecret>& caller, const std::optional<JobSecret>& callee,
         const std::string& to = "callee") {
  GreetingClient client(caller, {.id = 3, .token = "caller", .to = to, .heap_bytes = 77}, to_callee(to));
  GreetingServer server(callee, to_callee("callee"));
  Met met;
  Bytes next = client.first();
  for (int i = 0; i < 3; ++i) {
    auto answer = server.next(next);
    met.refused_by_server = answer.refusal;
    met.intro = answer.intro;
    if (met.intro) break;
    auto step = client.next(answer.send);
    met.refused_by_client = step.refusal;
    if (!step.refusal.empty()) break;
    next = step.send;
  }
  return met;
}

TEST(Greeting, TwoOfOneJobMeetWithOrWithoutASecret) {
  const auto secret = std::optional(JobSecret::mint());
  for (const auto& both : {secret, std::optional<JobSecret>()}) {
    const Met met = meet(both, both);
    ASSERT_TRUE(met.intro) << met.refused_by_server;
    EXPECT_EQ(met.intro->id, 3);
    EXPECT_EQ(met.intro->token, "caller");
    EXPECT_EQ(met.intro->heap_bytes, 77u);
  }
}

// The bytes that workers of other builds speak (docs/wire.md), written out.
TEST(Greeting, ItsBytesStayAsTheyAre) {
  const std::optional<JobSecret> none;
  GreetingClient client(none, {.id = 3, .token = "me", .to = "you", .heap_bytes = 0x1122}, to_callee("you"));
  GreetingServer server(none, to_callee("you"));
  EXPECT_EQ(client.first(), (Bytes{'N', 2}));
  EXPECT_EQ(server.next(client.first()).send, (Bytes{'G'}));
  Bytes introduction{'I', 2};
  introduction.resize(2 + net::kProofBytes);  // without a secret the proof is zero
  for (const int byte : {3, 0, 2, 0, +'m', +'e', 3, 0, +'y', +'o', +'u', 0x22, 0x11, 0, 0, 0, 0, 0, 0})
    introduction.push_back(static_cast<std::uint8_t>(byte));
  EXPECT_EQ(client.next(Bytes{'G'}).send, introduction);
  EXPECT_EQ(server.next(introduction).intro->heap_bytes, 0x1122u);
  const Bytes welcome{'W', 2, 5, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(encode_welcome({.slot = 5, .inbox_bytes = 0x1000}), welcome);
  EXPECT_EQ(client.next(welcome).welcome->inbox_bytes, 0x1000u);
  EXPECT_EQ(net::encode_refusal("no"), (Bytes{'X', 2, 0, 'n', 'o'}));
}

TEST(Greeting, WithASecretItsBytesAreThoseOfTheHandshake) {
  const JobSecret secret = JobSecret::mint();
  GreetingServer server(secret, to_callee("you"));
  GreetingClient client(secret, {.id = 3, .token = "me", .to = "you"}, to_callee("you"));
  const Bytes hello = client.first();
  ASSERT_EQ(hello.size(), 2 + sizeof(net::Hello));
  EXPECT_EQ(to_text(std::span(hello).first(10)), "H\x02\xA7LOCKST\x02");
  const Bytes challenge = server.next(hello).send;
  ASSERT_EQ(challenge.size(), 1 + sizeof(net::Challenge));
  EXPECT_EQ(challenge[0], 'C');
  const Bytes introduction = client.next(challenge).send;
  ASSERT_EQ(introduction.size(), 2 + net::kProofBytes + 19);
  EXPECT_EQ(to_text(std::span(introduction).first(2)), "I\x02");
}

TEST(Greeting, AMismatchedSecretOrWorkerIsRejectedWithAReason) {
  const auto secret = std::optional(JobSecret::mint()), other = std::optional(JobSecret::mint());
  EXPECT_NE(meet(secret, other).refused_by_client.find("another job secret"), std::string::npos);
  EXPECT_NE(meet(std::nullopt, secret).refused_by_client.find("this job has a secret"), std::string::npos);
  EXPECT_NE(meet(secret, std::nullopt).refused_by_client.find("this worker has none"), std::string::npos);
  EXPECT_NE(meet(secret, secret, "somebody").refused_by_client.find("another worker"), std::string::npos);
}

TEST(Greeting, NonsenseIsRefusedAtEveryStep) {
  const std::optional<JobSecret> none;
  for (const Bytes& bad : {Bytes{}, Bytes{'H'}, Bytes{'N', 9}, Bytes(900, 'H')}) {
    GreetingServer server(none, to_callee("callee"));
    EXPECT_FALSE(server.next(bad).refusal.empty());
    GreetingClient client(none, {}, {});
    EXPECT_FALSE(client.next(bad).refusal.empty());
  }
}

TEST(Greeting, PiecesOfAStreamAreTakenApartByteByByte) {
  base::ByteWriter stream;
  stream.raw(with_length(to_bytes("one"))).raw(with_length(to_bytes("three")));
  GreetingReader reader;
  std::vector<std::string> got;
  for (const std::uint8_t byte : stream.view()) {
    ASSERT_GE(reader.wanted(), 1u);
    if (const auto message = reader.feed({&byte, 1})) got.push_back(to_text(*message));
  }
  EXPECT_EQ(got, (std::vector<std::string>{"one", "three"}));
  for (const Bytes& length : {Bytes{0, 0}, Bytes{0xff, 0xff}}) {
    GreetingReader bad;
    EXPECT_FALSE(bad.feed(length));
    EXPECT_TRUE(bad.broken());
  }
}

}  // namespace
}  // namespace lockstep::transport::internal
