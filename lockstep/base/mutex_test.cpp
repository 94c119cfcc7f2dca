// The annotated mutex does what std::mutex does. What clang proves about it: tools/check_tidy_test.py.
#include "lockstep/base/detail/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>

#include "lockstep/base/detail/thread.h"

namespace lockstep::base {
namespace {

static_assert(sizeof(Mutex) == sizeof(std::mutex));
static_assert(sizeof(ConditionVariable) == sizeof(std::condition_variable));

bool is_held(Mutex& mutex) {
  bool held = true;
  Thread("look", [&] {
    if (!mutex.try_lock()) return;
    held = false;
    mutex.unlock();
  });
  return held;
}

constexpr std::chrono::steady_clock::time_point kLongAgo{};

TEST(Mutex, IsHeldByItsLockExceptBetweenUnlockAndLock) {
  Mutex mutex;
  {
    MutexLock lock(mutex);
    EXPECT_TRUE(is_held(mutex));
    lock.unlock();
    EXPECT_FALSE(is_held(mutex));
    lock.lock();
    EXPECT_TRUE(is_held(mutex));
  }
  EXPECT_FALSE(is_held(mutex));
}

TEST(Mutex, ALockThatIsNotHeldAtItsEndReleasesNothing) {
  Mutex mutex;
  {
    MutexLock lock(mutex);
    lock.unlock();
    mutex.lock();
  }
  EXPECT_TRUE(is_held(mutex));
  mutex.unlock();
}

TEST(Mutex, ALockTakesOverWhatTryLockLocked) {
  Mutex mutex;
  ASSERT_TRUE(mutex.try_lock());
  { const MutexLock lock(mutex, std::adopt_lock); }
  EXPECT_FALSE(is_held(mutex));
}

TEST(Mutex, AnUnlockIsOverAlsoWhenItsScopeThrows) {
  Mutex mutex;
  const MutexLock lock(mutex);
  try {
    const MutexUnlock open(mutex);
    EXPECT_FALSE(is_held(mutex));
    throw std::runtime_error("over");
  } catch (const std::runtime_error&) {
    EXPECT_TRUE(is_held(mutex));
  }
}

TEST(ConditionVariable, AWaitThatIsOverHoldsTheMutexAgain) {
  Mutex mutex;
  ConditionVariable changed;
  bool ready = false;
  const MutexLock lock(mutex);
  EXPECT_FALSE(changed.wait_until(mutex, kLongAgo, [&] { return ready; }));
  EXPECT_TRUE(is_held(mutex));
  Thread other("ready", [&] {
    const MutexLock mine(mutex);
    ready = true;
    changed.notify_all();
  });
  changed.wait(mutex, [&] { return ready; });
  EXPECT_TRUE(is_held(mutex));
}

TEST(ConditionVariable, WhatIsReadyIsFoundAfterTheTimeToo) {
  Mutex mutex;
  ConditionVariable changed;
  int asked = 0;
  const MutexLock lock(mutex);
  EXPECT_TRUE(changed.wait_until(mutex, kLongAgo, [&] { return ++asked == 2; }));
  EXPECT_TRUE(changed.wait_for(mutex, std::chrono::hours(1), [] { return true; }));
}

TEST(ConditionVariable, APredicateThatThrowsLeavesTheMutexHeld) {
  Mutex mutex;
  ConditionVariable changed;
  const auto over = []() -> bool { throw std::runtime_error("over"); };
  const MutexLock lock(mutex);
  EXPECT_THROW(changed.wait(mutex, over), std::runtime_error);
  EXPECT_THROW(changed.wait_until(mutex, kLongAgo, over), std::runtime_error);
  EXPECT_TRUE(is_held(mutex));
}

}  // namespace
}  // namespace lockstep::base
