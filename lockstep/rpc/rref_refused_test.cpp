// RRefs in messages that never reach anybody who decodes them: they are given back.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::caught;
using testing::expect_no_rrefs;
using testing::run_workers;
using testing::says;
using testing::ShortTransport;
using testing::until;
using testing::Workers;

std::atomic<int> n_alive{0};
struct Thing {
  Thing() { ++n_alive; }
  Thing(const Thing&) = delete;
  ~Thing() { --n_alive; }
};
LOCKSTEP_RPC_CLASS(Thing);

void take(const RRef<Thing>&, const std::string&) {}
LOCKSTEP_RPC_FUNCTION(take);

std::pair<RRef<Thing>, std::string> give(int n_bytes) {
  return {RRef<Thing>::of(), std::string(static_cast<std::size_t>(n_bytes), 'x')};
}
LOCKSTEP_RPC_FUNCTION(give);

RRef<std::string> exchange_for_text(const RRef<Thing>&, const std::string& text) {
  return RRef<std::string>(text);
}
LOCKSTEP_RPC_FUNCTION(exchange_for_text);

testing::WorkersOptions with_limit() {
  return {.wrap = [](WorkerId, auto inner) {
    return std::make_unique<ShortTransport>(std::move(inner), 10'000);
  }};
}

}  // namespace
}  // namespace lockstep::rpc

namespace {
struct Fragile {};
}  // namespace
namespace lockstep::object {
template <>
struct Codec<Fragile> {
  static std::string name() { return "fragile"; }
  static void write(Encoder&, const Fragile&) { base::raise(ErrorKind::kUnsupported, "it broke"); }
  static void read(Decoder&, Fragile&) {}
};
}  // namespace lockstep::object

namespace lockstep::rpc {
namespace {

std::pair<RRef<Thing>, Fragile> give_fragile() {
  return {RRef<Thing>::of(), Fragile{}};
}
LOCKSTEP_RPC_FUNCTION(give_fragile);

TEST(RefusedMessage, GivesBackTheRRefsOfACallThatIsTooLong) {
  n_alive = 0;
  run_workers(
      3,
      [](int rank, Workers&) {
        if (rank != 0) return;
        {
          const std::string text(20'000, 'x');
          const auto mine = RRef<Thing>::of();
          const auto far = remote<Thing>(1);
          for (const auto& thing : {mine, far}) {
            EXPECT_TRUE(says(caught([&] { rpc_sync(2, take, {thing, text}); }), "beyond the limit"));
            const auto later = remote(2, exchange_for_text, {thing, text});
            EXPECT_TRUE(says(caught([&] { later.to_here(); }), "beyond the limit"));
          }
          rpc_sync(2, take, {far, "short"});
        }
        until([] { return n_alive == 0; });
      },
      with_limit(), expect_no_rrefs);
}

TEST(RefusedMessage, GivesBackTheRRefsOfAnAnswerThatIsTooLong) {
  n_alive = 0;
  run_workers(
      2,
      [](int rank, Workers&) {
        if (rank != 0) return;
        EXPECT_TRUE(says(caught([] { rpc_sync(1, give, {20'000}); }), "beyond the limit"));
        until([] { return n_alive == 0; });
        EXPECT_EQ(rpc_sync(1, give, {20}).second.size(), 20u);
        until([] { return n_alive == 0; });
      },
      with_limit(), expect_no_rrefs);
}

TEST(RefusedMessage, GivesBackTheRRefsBesideAValueThatCannotBeEncoded) {
  n_alive = 0;
  run_workers(
      2,
      [](int rank, Workers&) {
        if (rank != 0) return;
        const auto answer = caught([] { rpc_sync(1, give_fragile); });
        EXPECT_TRUE(says(answer, "it broke")) << answer.message;
        {
          const auto thing = RRef<Thing>::of();
          const auto call = caught([&] {
            rpc_sync(1, function<void(RRef<Thing>, Fragile)>("take"), {thing, Fragile{}});
          });
          EXPECT_TRUE(says(call, "it broke")) << call.message;
        }
        until([] { return n_alive == 0; });
      },
      {}, expect_no_rrefs);
}

TEST(RefusedMessage, ReleasesTheRRefsOfACallWithoutAHandler) {
  n_alive = 0;
  run_workers(
      3,
      [](int rank, Workers&) {
        if (rank != 0) return;
        {
          const auto far = remote<Thing>(1);
          EXPECT_TRUE(says(caught([&] { rpc_sync(2, function<void(RRef<Thing>)>("nobody"), {far}); }),
                           "no function is registered"));
          EXPECT_TRUE(says(caught([&] { rpc_sync(2, function<void(RRef<Thing>)>("take"), {far}); }),
                           "arguments of take"));
        }
        until([] { return n_alive == 0; });
      },
      {}, expect_no_rrefs);
}

// What a worker out of order could send: every remote() of it is for the RRef of its first.
class OneIdTransport final : public testing::TransportWrapper {
 public:
  using TransportWrapper::TransportWrapper;
  std::optional<Failure> send(WorkerId to, transport::Message message, Deadline deadline) override {
    if (message.kind == static_cast<std::uint8_t>(MessageKind::kRemoteCall)) {
      Bytes body(message.body.bytes.begin(), message.body.bytes.end());
      if (first_.empty()) first_.assign(body.begin(), body.begin() + kIdBytes);
      std::copy(first_.begin(), first_.end(), body.begin());
      message.body = transport::owned_blob(std::move(body));
    }
    return TransportWrapper::send(to, std::move(message), deadline);
  }

 private:
  static constexpr std::ptrdiff_t kIdBytes = 8;
  Bytes first_;
};

std::string make_text() {
  return "of another type";
}
LOCKSTEP_RPC_FUNCTION(make_text);
int make_number() {
  return 41;
}
LOCKSTEP_RPC_FUNCTION(make_number);

TEST(RefusedMessage, DoesNotMakeTheValueOfOneRRefTwice) {
  run_workers(
      2,
      [](int rank, Workers&) {
        if (rank != 0) return;
        const auto number = remote(1, make_number);
        EXPECT_EQ(number.to_here(), 41);
        const auto again = remote(1, make_text);
        const auto refused = caught([&] { again.get_future().wait(); });
        EXPECT_TRUE(says(refused, "was made before")) << refused.message;
        EXPECT_EQ(number.to_here(), 41) << "it is still what it was";
      },
      {.wrap = [](WorkerId, auto inner) { return std::make_unique<OneIdTransport>(std::move(inner)); }});
}

TEST(RefusedMessage, DoesNotMakeAnRRefInTheNameOfAnother) {
  std::atomic<std::uint64_t> id{0};
  run_workers(3, [&](int rank, Workers&) {
    if (rank == 0) {
      const auto number = remote(1, make_number);
      EXPECT_EQ(number.to_here(), 41);
      id = number.state()->id();
      until([&] { return id == 0; });
      EXPECT_EQ(number.to_here(), 41) << "it is still what it was";
    } else if (rank == 2) {
      until([&] { return id != 0; });
      const auto agent = current_agent("test");
      auto call = internal::encode_call(
          internal::make_call("rpc_remote", 1, "make_text", std::tuple<>(), CallOptions{}));
      base::ByteWriter writer;
      writer.put(std::uint64_t{id + 1}).put(agent->new_id()).raw(call.body);
      const auto refused = caught([&] {
        agent->request(1, MessageKind::kRemoteCall, {.body = writer.take()}, 10s, "a forged call").wait();
      });
      EXPECT_TRUE(says(refused, "is not its sender's to make")) << refused.message;
      id = 0;
    }
  });
}

}  // namespace
}  // namespace lockstep::rpc
