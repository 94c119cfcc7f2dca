#include "lockstep/net/looks.h"

#include "lockstep/net/complaints.h"

#include <gtest/gtest.h>

namespace lockstep::net {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr Looks::Clock::time_point kStart{milliseconds(1'000'000)};

TEST(Looks, AYieldThatTookLongEndsLookingForAWhileAndEachTimeForLonger) {
  Looks looks;
  auto now = kStart;
  EXPECT_TRUE(looks.allowed(now));
  looks.account(now, now + microseconds(5));
  EXPECT_TRUE(looks.allowed(now)) << "others of the same conversation had the core";
  for (const auto pause : {milliseconds(10), milliseconds(20), milliseconds(40)}) {
    const auto after = now + milliseconds(3);
    looks.account(now, after);
    EXPECT_FALSE(looks.allowed(after + pause - microseconds(1)));
    now = after + pause;
    EXPECT_TRUE(looks.allowed(now));
  }
  for (int i = 0; i < 100; ++i) looks.account(now, now + milliseconds(3));
  EXPECT_TRUE(looks.allowed(now + milliseconds(1'003))) << "a second at most";
}

TEST(Looks, OnAMachineThatHasBecomeQuietAPauseIsShortAgain) {
  Looks looks;
  for (int i = 0; i < 5; ++i) looks.account(kStart, kStart + milliseconds(3));
  for (int i = 0; i < 1'000; ++i) looks.account(kStart, kStart + microseconds(1));
  looks.account(kStart, kStart + milliseconds(3));
  EXPECT_TRUE(looks.allowed(kStart + milliseconds(13)));
}

TEST(Complaints, StrangersCannotFillALog) {
  Complaints complaints;
  const auto begin = Complaints::Clock::now();
  int n = 0;
  for (int i = 0; i < 100'000; ++i) n += complaints.allowed(begin + std::chrono::milliseconds(i)) ? 1 : 0;
  EXPECT_GE(n, 20 + 9);
  EXPECT_LE(n, 20 + 10) << "within a hundred seconds";
  EXPECT_NE(complaints.held_back(), "");
  EXPECT_EQ(complaints.held_back(), "");
  EXPECT_TRUE(complaints.allowed(begin + std::chrono::hours(1)));
}

}  // namespace
}  // namespace lockstep::net
