#include "lockstep/net/sealed.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::net {
namespace {

DirectionKey key(std::uint8_t seed) {
  DirectionKey key;
  std::iota(key.key.begin(), key.key.end(), seed);
  std::iota(key.iv.begin(), key.iv.end(), static_cast<std::uint8_t>(seed + 100));
  return key;
}

Bytes sealed(Sealer& sealer, std::string_view text) {
  Bytes out;
  sealer.seal(to_bytes(text), out);
  return out;
}

// What comes out of the opener in all; nothing when it failed.
std::optional<std::string> opened(Opener& opener, std::span<const std::uint8_t> bytes) {
  std::string text;
  while (!bytes.empty() && !opener.failed()) {
    if (const auto plain = opener.next(bytes)) text += to_text(*plain);
  }
  return opener.failed() ? std::nullopt : std::optional(text);
}

TEST(Sealed, WhatIsSealedOpensHoweverItIsCut) {
  Sealer sealer(key(1));
  Bytes stream;
  std::string all;
  for (std::size_t n : {1, 5, 1000, 65536, 65537, 200'000}) {
    const std::string text(n, static_cast<char>('a' + n % 26));
    all += text;
    const Bytes part = sealed(sealer, text);
    stream.insert(stream.end(), part.begin(), part.end());
  }
  for (const std::size_t step : {std::size_t{1}, std::size_t{3}, std::size_t{4096}, stream.size()}) {
    Opener opener(key(1));
    std::string text;
    for (std::size_t at = 0; at < stream.size(); at += step) {
      const auto part = opened(opener, std::span(stream).subspan(at, std::min(step, stream.size() - at)));
      ASSERT_TRUE(part);
      text += *part;
    }
    EXPECT_EQ(text, all) << step;
    EXPECT_TRUE(opener.between_records());
  }
}

// Two texts under one nonce give each other away.
TEST(Sealed, AForkedChildCannotSealWithItsParentsNumbers) {
  Sealer sealer(key(1));
  sealed(sealer, "before");
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      sealed(sealer, "of the child");
    } catch (const Error& error) {
      ::_exit(error.kind() == ErrorKind::kUsage ? 0 : 1);
    }
    ::_exit(2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(sealed(sealer, "of the parent").empty());
}

TEST(Sealed, NothingOfTheTextIsSeenFromOutside) {
  Sealer sealer(key(1));
  EXPECT_EQ(to_text(sealed(sealer, "a text that is long enough")).find("text"), std::string::npos);
  EXPECT_NE(sealed(sealer, "same"), sealed(sealer, "same"));
}

TEST(Sealed, NoBitMayBeFlipped) {
  Sealer sealer(key(1));
  const Bytes good = sealed(sealer, "value");
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    Opener opener(key(1));
    bad.resize(
        std::max<std::size_t>(bad.size(), kRecordHead + kMaxRecord + kRecordTag));  // if it asks for more
    EXPECT_FALSE(opened(opener, bad)) << bit;
  }
}

TEST(Sealed, ARecordThatIsRepeatedLeftOutOrMovedDoesNotOpen) {
  Sealer sealer(key(1));
  const Bytes first = sealed(sealer, "first"), second = sealed(sealer, "second"),
              third = sealed(sealer, "third");
  const auto fails_at_the_end = [](const std::vector<Bytes>& records) {
    Opener opener(key(1));
    for (std::size_t i = 0; i + 1 < records.size(); ++i) EXPECT_TRUE(opened(opener, records[i])) << i;
    EXPECT_FALSE(opened(opener, records.back()));
    EXPECT_FALSE(opened(opener, records.back())) << "and nothing opens after it";
  };
  fails_at_the_end({first, first});
  fails_at_the_end({first, second, first});
  fails_at_the_end({first, third});
  fails_at_the_end({second});
}

TEST(Sealed, WhatOneSideSealedIsNotTakenForTheOthers) {
  Sealer client(key(1));
  Opener of_server(key(2));
  EXPECT_FALSE(opened(of_server, sealed(client, "reflected")));
}

TEST(Sealed, ACutRecordShowsNothingOfItself) {
  Sealer sealer(key(1));
  const Bytes whole = sealed(sealer, "value");
  Opener opener(key(1));
  EXPECT_EQ(opened(opener, std::span(whole).first(whole.size() - 1)), "");
  EXPECT_FALSE(opener.between_records());
}

TEST(Sealed, ALengthBeyondTheLimitOrOfNothingIsRefusedAtOnce) {
  for (const std::uint32_t n : {0u, 65537u, ~0u}) {
    Opener opener(key(1));
    Bytes head(4);
    std::memcpy(head.data(), &n, sizeof n);
    EXPECT_FALSE(opened(opener, head)) << n;
  }
}

TEST(Sealed, BothSidesMoveOnToANewKeyTogether) {
  Sealer sealer(key(1), 3), stays(key(1));
  Opener opener(key(1), 3);
  for (int i = 0; i < 10; ++i) {
    const Bytes record = sealed(sealer, "text");
    EXPECT_EQ(record == sealed(stays, "text"), i < 3) << i;
    EXPECT_EQ(opened(opener, record), "text") << i;
  }
}

}  // namespace
}  // namespace lockstep::net
