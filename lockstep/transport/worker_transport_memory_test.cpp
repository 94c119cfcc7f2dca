// A transport that has no memory for what arrives: one connection ends, nothing else does. Memory is refused
// by a replaced operator new, the one for aligned blocks, which only Buffer uses here.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "lockstep/base/detail/text.h"
#include "lockstep/transport/transport_contract.h"
#include "lockstep/transport/worker_transport.h"

namespace {
// Aligned blocks above this size are refused.
std::atomic<std::size_t> limit{SIZE_MAX};

void* allocate(std::size_t n_bytes, std::align_val_t alignment) {
  if (n_bytes > limit) throw std::bad_alloc();
  const auto line = static_cast<std::size_t>(alignment);
  if (void* block = std::aligned_alloc(line, (n_bytes + line - 1) / line * line)) return block;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(std::size_t n_bytes, std::align_val_t alignment) {
  return allocate(n_bytes, alignment);
}
void* operator new[](std::size_t n_bytes, std::align_val_t alignment) {
  return allocate(n_bytes, alignment);
}
void operator delete(void* block, std::align_val_t) noexcept {
  std::free(block);
}
void operator delete[](void* block, std::align_val_t) noexcept {
  std::free(block);
}
void operator delete(void* block, std::size_t, std::align_val_t) noexcept {
  std::free(block);
}
void operator delete[](void* block, std::size_t, std::align_val_t) noexcept {
  std::free(block);
}

namespace lockstep::transport {
namespace {

class NoMemory : public testing::TestWithParam<Route> {};
INSTANTIATE_TEST_SUITE_P(WorkerTransport, NoMemory, testing::Values(Route::kAuto, Route::kTcp),
                         [](const auto& test) {
                           return test.param == Route::kAuto ? "SharedMemory" : "Tcp";
                         });

std::optional<Event> next(Transport& one, const std::vector<Transport*>& others) {
  for (const Deadline deadline = patience(); !deadline.expired();) {
    if (auto event = one.poll()) return event;
    for (Transport* other : others) other->poll();
  }
  return std::nullopt;
}

TEST_P(NoMemory, ForAMessageEndsThatConnectionOnly) {
  std::vector<std::unique_ptr<Transport>> all;
  for (WorkerId id = 0; id < 3; ++id) {
    all.push_back(open_worker_transport({.id = id, .name = base::cat("worker", id), .route = GetParam()}));
    for (WorkerId other = 0; other < id; ++other) {
      all[id]->add_peer(other, base::cat("worker", other), all[other]->address());
      all[other]->add_peer(id, base::cat("worker", id), all[id]->address());
    }
  }
  Transport &receiver = *all[0], &greedy = *all[1], &modest = *all[2];
  for (Transport* sender : {&greedy, &modest}) {
    ASSERT_FALSE(sender->send(0, message_of(1, 100), patience()));
    const auto event = next(receiver, {&greedy, &modest});
    ASSERT_TRUE(event && is_message(event->message, 1, 100));
  }
  // Of so many pieces that its record does not fit into a ring, and one that a stream has to have a buffer
  // for.
  Message large = message_of(2, 100);
  for (int i = 0; i < 2000; ++i) large.blobs.push_back(owned_blob(Bytes(64, 7)));
  large.blobs.push_back(owned_blob(Bytes(1 << 20, 7)));
  limit = 64 << 10;
  EXPECT_FALSE(greedy.send(0, std::move(large), patience()));
  const auto lost = next(receiver, {&greedy, &modest});
  limit = SIZE_MAX;
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->what, Event::What::kLost);
  EXPECT_EQ(lost->from, 1);
  EXPECT_NE(lost->cause.find("no memory"), std::string::npos) << lost->cause;
  ASSERT_FALSE(modest.send(0, message_of(3, 100), patience()));
  const auto event = next(receiver, {&modest});
  ASSERT_TRUE(event && is_message(event->message, 3, 100)) << "the others go on";
}

}  // namespace
}  // namespace lockstep::transport
