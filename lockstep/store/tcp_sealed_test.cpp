// Somebody who controls the network between a store and its client, both of which have the job secret: he
// sees every record and may change, repeat, keep back, reorder or invent some.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/call_testing.h"
#include "lockstep/base/error.h"
#include "lockstep/net/sealed.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/internal/tcp_session.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using call_testing::patience;

using internal::TcpSession;
using internal::TcpShared;

// What becomes of a record: what is passed on in its place. Records of each direction are numbered from 0;
// the client's first holds its validation, the server's first the answer to that.
using Tamper = std::function<std::vector<Bytes>(int number, const Bytes& record)>;

std::vector<Bytes> pass_on(int, const Bytes& record) {
  return {record};
}

// Cuts one direction into records, after the handshake's `clear` bytes.
class Tap {
 public:
  Tap(std::size_t clear, Tamper tamper) : clear_(clear), tamper_(std::move(tamper)) {}
  Bytes pass(std::span<const std::uint8_t> bytes) {
    held_.insert(held_.end(), bytes.begin(), bytes.end());
    Bytes out = take(std::min(clear_, held_.size()));
    clear_ -= out.size();
    while (clear_ == 0 && held_.size() >= net::kRecordHead) {
      std::uint32_t n = 0;
      std::memcpy(&n, held_.data(), sizeof n);
      const std::size_t whole = net::kRecordHead + n + net::kRecordTag;
      if (held_.size() < whole) break;
      for (const Bytes& one : tamper_(number_++, take(whole))) out.insert(out.end(), one.begin(), one.end());
    }
    return out;
  }

 private:
  Bytes take(std::size_t n) {
    Bytes part(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(n));
    held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(n));
    return part;
  }
  std::size_t clear_;
  const Tamper tamper_;
  Bytes held_;
  int number_ = 0;
};

// A store for one client, and the man in the middle before it.
class Middle {
 public:
  explicit Middle(const Tamper& up, const Tamper& down = pass_on)
      : up_(sizeof(net::Hello) + sizeof(net::Proof), up),
        down_(sizeof(net::Challenge), down),
        thread_([this] { run(); }) {}
  ~Middle() { finish(); }

  std::unique_ptr<TcpStore> connect() {
    return TcpStore::open("127.0.0.1", {.port = listener_.local().port(),
                                        .timeout = Milliseconds(20'000),
                                        .secret = secret_,
                                        .local_socket = false});
  }
  // Call when the client is gone. What the store holds then.
  std::optional<std::string> value(const std::string& key) {
    finish();
    const auto value = shared_.data.find("/" + key);
    return value ? std::optional(to_text(*value)) : std::nullopt;
  }
  // Why the store ended the connection; empty when it did not.
  const std::string& why() {
    finish();
    return why_;
  }

 private:
  void finish() {
    if (thread_.joinable()) thread_.join();
  }
  void run() {
    try {
      net::Socket socket = listener_.accept(patience());
      TcpSession session(shared_, nullptr,
                         {.purpose = net::Purpose::kStoreTcp, .address = listener_.local().canonical()});
      Bytes bytes(1 << 16);
      for (bool good = true; good;) {
        const std::size_t n = socket.read_some(bytes, patience());
        good = session.feed(up_.pass(std::span(bytes).first(n)));
        why_ = session.why();
        socket.write_all(down_.pass(std::exchange(session.output(), {})), patience());
      }
    } catch (const Error&) {
      // The client is gone.
    }
  }

  const JobSecret secret_ = JobSecret::mint();
  net::Listener listener_ = net::Listener::listen(*net::Address::parse("127.0.0.1", 0), 4);
  TcpShared shared_{TcpStoreLimits{}, secret_};
  Tap up_;
  Tap down_;
  std::string why_;
  std::thread thread_;
};

// Changes record `number` by `change` and passes everything else on.
Tamper only(int number, const std::function<std::vector<Bytes>(Bytes)>& change) {
  return
      [=](int at, const Bytes& record) { return at == number ? change(record) : std::vector<Bytes>{record}; };
}

std::vector<Bytes> flip_last_bit_of_text(Bytes record) {
  record[record.size() - net::kRecordTag - 1] ^= 1;
  return {record};
}

TEST(TcpSealed, UndisturbedTheStoreWorksAndNothingIsReadableOnTheWay) {
  std::string seen;
  const Tamper listen_in = [&](int, const Bytes& record) {
    seen += to_text(record);
    return std::vector<Bytes>{record};
  };
  Middle middle(listen_in);
  {
    const auto client = middle.connect();
    client->set("name", "treasure");
    EXPECT_EQ(to_text(client->get("name")), "treasure");
    EXPECT_EQ(client->add("n", 2), 2);
    const Bytes large(300'000, 7);
    client->set("large", large);
    EXPECT_EQ(client->get("large"), large) << "many records";
  }
  EXPECT_EQ(middle.value("name"), "treasure");
  EXPECT_EQ(seen.find("treasure"), std::string::npos);
  EXPECT_EQ(middle.why(), "");
}

TEST(TcpSealed, ABitFlippedOnTheWayToTheStoreEndsTheConnectionAndSetsNothing) {
  Middle middle(only(1, flip_last_bit_of_text));
  {
    const auto client = middle.connect();
    EXPECT_THROW(
        {
          client->set("key", "value");
          client->num_keys();
        },
        DistNetworkError);
  }
  EXPECT_EQ(middle.value("key"), std::nullopt);
  EXPECT_NE(middle.why().find("in transit"), std::string::npos) << middle.why();
}

TEST(TcpSealed, ABitFlippedOnTheWayBackIsAnErrorAndNoValue) {
  Middle middle(pass_on, only(1, flip_last_bit_of_text));
  const auto client = middle.connect();
  try {
    ADD_FAILURE() << "the sum is " << client->add("n", 1);
  } catch (const DistNetworkError& error) {
    EXPECT_NE(std::string_view(error.what()).find("did not send"), std::string_view::npos) << error.what();
  }
  EXPECT_THROW(client->num_keys(), DistNetworkError) << "and the handle stays broken";
}

TEST(TcpSealed, ARepeatedRequestIsNotExecutedTwice) {
  Middle middle(only(1, [](const Bytes& record) { return std::vector<Bytes>{record, record}; }));
  {
    const auto client = middle.connect();
    EXPECT_THROW(
        {
          client->add("n", 1);
          client->num_keys();
        },
        DistNetworkError);
  }
  EXPECT_EQ(middle.value("n"), "1");
}

TEST(TcpSealed, RequestsThatChangePlacesAreRefused) {
  Bytes kept;
  const Tamper swap = [&](int number, const Bytes& record) {
    if (number != 1) return std::vector<Bytes>{record, std::exchange(kept, {})};
    kept = record;
    return std::vector<Bytes>{};
  };
  Middle middle(swap);
  {
    const auto client = middle.connect();
    EXPECT_THROW(
        {
          client->set("key", "first");
          client->compare_set("key", to_bytes("first"), to_bytes("second"));
        },
        DistNetworkError);
  }
  EXPECT_EQ(middle.value("key"), std::nullopt);
}

TEST(TcpSealed, ARequestThatIsSwallowedIsNoticedWithTheNextOne) {
  Middle middle(only(1, [](const Bytes&) { return std::vector<Bytes>{}; }));
  const auto client = middle.connect();
  EXPECT_THROW(
      {
        client->set("key", "value");
        client->num_keys();
      },
      DistNetworkError);
}

TEST(TcpSealed, AReplyCutShortIsAnError) {
  // And then the end: the store gives up on the client's next words.
  Middle middle(only(2, flip_last_bit_of_text), only(1, [](Bytes record) {
                  record.pop_back();
                  return std::vector<Bytes>{record};
                }));
  const auto client = middle.connect();
  client->set_timeout(Milliseconds(50));
  EXPECT_THROW(client->add("n", 1), DistNetworkError);
}

TEST(TcpSealed, TheClientsOwnBytesSentBackAreNotAReply) {
  Bytes own;
  Middle middle(
      [&](int, const Bytes& record) {
        own = record;
        return std::vector<Bytes>{record};
      },
      only(1, [&](const Bytes&) { return std::vector<Bytes>{own}; }));
  const auto client = middle.connect();
  EXPECT_THROW(client->num_keys(), DistNetworkError);
}

}  // namespace
}  // namespace lockstep
