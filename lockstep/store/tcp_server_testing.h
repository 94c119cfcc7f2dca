// For tests that talk to a TcpStore's server in raw bytes.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>

#include "lockstep/base/bytes.h"
#include "lockstep/base/call_testing.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/error.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/internal/tcp_protocol.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::tcp_server_testing {

using call_testing::patience;
using internal::Query;

inline const std::string kServerHost = "127.0.0.1";

inline base::ByteWriter request(Query query) {
  base::ByteWriter writer;
  writer.put(query);
  return writer;
}

inline Bytes validation() {
  return request(Query::kValidate).put(internal::kValidationMagic).take();
}

inline std::uint64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  std::uint64_t pages = 0;
  in >> pages >> pages;
  return pages * 4096;
}

class TcpServerTest : public ::testing::Test {
 protected:
  void start(TcpStoreOptions options = {}) {
    options.port = 0;
    options.is_master = true;
    store_ = TcpStore::open(kServerHost, options);
  }

  net::Socket connect() { return net::Socket::connect(kServerHost, store_->port(), patience()); }
  net::Socket connect_validated() {
    net::Socket socket = connect();
    socket.write_all(validation(), patience());
    return socket;
  }
  static void send(net::Socket& socket, const base::ByteWriter& bytes) {
    socket.write_all(bytes.view(), patience());
  }

  // Returns when the server has accepted the connection and executed what was sent.
  static void ping(net::Socket& socket) {
    send(socket, request(Query::kPing).put(std::uint32_t{5}));
    Bytes pong(4);
    socket.read_exact(pong, patience());
    EXPECT_EQ(base::ByteReader(pong).get<std::uint32_t>(), 5u);
  }

  // Reads until the server closes; fails the test when it does not.
  static Bytes read_to_end(net::Socket& socket) {
    Bytes all;
    Bytes part(4096);
    try {
      for (;;) {
        const std::size_t n = socket.read_some(part, patience());
        all.insert(all.end(), part.begin(), part.begin() + static_cast<std::ptrdiff_t>(n));
      }
    } catch (const DistNetworkError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
    }
    return all;
  }

  void expect_closed(const base::ByteWriter& bytes) {
    net::Socket socket = connect_validated();
    try {
      socket.write_all(bytes.view(), patience());
    } catch (const DistNetworkError&) {
      // Closed before it had read everything.
    }
    EXPECT_TRUE(read_to_end(socket).empty());
    expect_alive();
  }

  void expect_alive() {
    const std::int64_t n = store_->add("alive", 1);
    EXPECT_EQ(store_->add("alive", 1), n + 1);
  }

  std::unique_ptr<TcpStore> store_;
};

}  // namespace lockstep::tcp_server_testing
