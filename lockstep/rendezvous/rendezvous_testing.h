// For tests of rendezvous: ranks are threads, the environment is empty at first and restored after each test,
// and what is logged is kept.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <future>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/net/address.h"
#include "lockstep/net/socket.h"
#include "lockstep/rendezvous/clean_environment.h"
#include "lockstep/rendezvous/rendezvous.h"

namespace lockstep::rendezvous_testing {

inline constexpr Milliseconds kPatience{60'000};
inline constexpr Milliseconds kShort{50};

class Rendezvous : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "rendezvous_XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    logged().clear();
    set_log_level(LogLevel::kInfo);
    set_log_sink([](LogLevel, std::string_view text) {
      const std::lock_guard lock(log_mutex());
      logged() += base::cat(text, '\n');
    });
  }
  void TearDown() override {
    set_log_sink(nullptr);
    set_log_level(LogLevel::kWarn);
    for (const char* name : {"/store", "/secret", "/lockstep.secret"}) ::unlink((folder_ + name).c_str());
    ::rmdir(folder_.c_str());
  }

  // Set and held until the end of the test, all other variables unset.
  void environment(const Variables& variables) {
    for (const auto& [name, text] : variables) CleanEnvironment::set(name, text);
  }

  // A port that nobody listened on a moment ago.
  static std::string free_port() {
    return std::to_string(net::Listener::listen(*net::Address::parse("127.0.0.1", 0), 1).local().port());
  }

  // Every rank comes with `options` and its own rank; each then sends the others its rank and gets the last
  // one's.
  static void expect_to_meet(int world_size, RendezvousOptions options) {
    std::vector<std::future<RendezvousResult>> ranks;
    options.timeout = kPatience;
    for (int rank = 0; rank < world_size; ++rank) {
      options.rank = rank;
      ranks.push_back(std::async(std::launch::async, [options] { return rendezvous(options); }));
    }
    std::vector<RendezvousResult> results;
    for (auto& rank : ranks) results.push_back(rank.get());
    for (int rank = 0; rank < world_size; ++rank) {
      auto& result = results[static_cast<std::size_t>(rank)];
      EXPECT_EQ(result.rank, rank);
      EXPECT_EQ(result.world_size, world_size);
      ASSERT_TRUE(result.store);
      EXPECT_EQ(result.store->timeout(), kPatience);
      EXPECT_EQ(result.store->add("came", 1), rank + 1);
    }
  }

  template <class Class = Error>
  static std::string error_of(const RendezvousOptions& options, ErrorKind kind = ErrorKind::kUsage) {
    try {
      rendezvous(options);
    } catch (const Class& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "raised another class: " << error.what();
      return "";
    }
    ADD_FAILURE() << options.init_method << " raised nothing";
    return "";
  }

  static void expect_words(const std::string& text, const std::vector<std::string>& words) {
    for (const auto& word : words)
      EXPECT_NE(text.find(word), std::string::npos) << word << " is not in: " << text;
  }

  static std::mutex& log_mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::string& logged() {
    static std::string lines;
    return lines;
  }

  const CleanEnvironment clean_;
  std::string folder_;
};

}  // namespace lockstep::rendezvous_testing
