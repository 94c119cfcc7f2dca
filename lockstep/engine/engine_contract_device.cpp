// The order between operations on a device and what else its streams do. A delay is a host function that sleeps: it is
// long against an engine that does not wait, and nothing fails because it took longer. A gate is a host function that
// holds its stream until the test opens it.
#include <thread>

#include "lockstep/engine/engine_contract_case.h"

namespace lockstep::comm {
namespace {

// A device engine instantiates the suite; other programs link it and do not.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EngineDeviceContract);

void sleep_a_while(void*) {
  std::this_thread::sleep_for(Milliseconds(30));
}

// Opens by itself when the test does not get to it, so that a blocked test fails instead of hanging.
class Gate {
 public:
  ~Gate() { open(); }
  static void hold(void* self) {
    auto& gate = *static_cast<Gate*>(self);
    const Deadline patience = Deadline::after(testing::kPatience / 4);
    while (!gate.open_) {
      if (patience.expired()) {
        gate.was_forced_ = true;
        return;
      }
      std::this_thread::yield();
    }
  }
  void open() { open_ = true; }
  // Whoever was to open it was blocked by it.
  bool was_forced() const { return was_forced_; }

 private:
  std::atomic<bool> open_{false}, was_forced_{false};
};

// Device memory with a value in every element.
class Floats {
 public:
  Floats(testing::TestMemory& memory, std::size_t count, float value) : memory_(memory), count_(count) {
    data_ = static_cast<float*>(memory.allocate(count * sizeof(float)));
    const std::vector<float> host(count, value);
    memory.copy_in(data_, host.data(), count * sizeof(float));
  }
  ~Floats() { memory_.free(data_, count_ * sizeof(float)); }
  Floats(const Floats&) = delete;

  float* data() const { return data_; }
  std::size_t count() const { return count_; }
  std::size_t n_bytes() const { return count_ * sizeof(float); }
  std::vector<float> read() const {
    std::vector<float> host(count_);
    memory_.copy_out(host.data(), data_, n_bytes());
    return host;
  }

 private:
  testing::TestMemory& memory_;
  const std::size_t count_;
  float* data_;
};

lockstep_op all_reduce(ContractRank& rank, const Floats& send, const Floats& recv,
                       Milliseconds timeout = testing::kPatience) {
  auto op =
      ContractRank::op(LOCKSTEP_ALL_REDUCE, send.data(), recv.data(), send.count(), LOCKSTEP_F32, timeout);
  rank.memory()->place(op);
  return op;
}

// Every element of `floats` is `want`.
void expect_all(const Floats& floats, float want, const std::string& where) {
  const auto host = floats.read();
  for (std::size_t i = 0; i < host.size(); ++i)
    ASSERT_EQ(host[i], want) << "element " << i << " of " << host.size() << ", " << where;
}

constexpr std::size_t kCounts[] = {5, 70'000};

// What is sent is written by the stream, late, on one rank after the other.
TEST_P(EngineDeviceContract, AnOperationComesAfterWhatItsStreamHadToDoBefore) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  on_all_sizes([&](Rank& rank) {
    for (const std::size_t count : kCounts) {
      for (int late = 0; late < rank.size(); ++late) {
        for (const bool posted : {true, false}) {
          testing::TestMemory& memory = *rank.memory();
          const Floats value(memory, count, 2.f), send(memory, count, 1000.f), recv(memory, count, -1.f);
          if (rank.rank() == late) memory.enqueue_call(sleep_a_while, nullptr, memory.stream());
          memory.enqueue_copy(send.data(), value.data(), value.n_bytes(), memory.stream());
          ASSERT_EQ(rank.call(all_reduce(rank, send, recv), posted), LOCKSTEP_OK) << rank.error();
          expect_all(recv, 2.f * static_cast<float>(rank.size()),
                     base::cat("rank ", late, " was late, ", posted ? "posted" : "run"));
          rank.meet();  // memory goes back to the pool
        }
      }
    }
  });
}

TEST_P(EngineDeviceContract, AMessageComesAfterWhatItsStreamHadToDoBefore) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_SEND, LOCKSTEP_RECV);
  on_ranks(2, [&](Rank& rank) {
    for (const std::size_t count : kCounts) {
      testing::TestMemory& memory = *rank.memory();
      const Floats value(memory, count, 3.f), buffer(memory, count, 1000.f);
      const bool sends = rank.rank() == 0;
      auto op = Rank::op(sends ? LOCKSTEP_SEND : LOCKSTEP_RECV, buffer.data(), buffer.data(), count);
      op.root = sends ? 1 : 0;
      memory.place(op);
      memory.enqueue_call(sleep_a_while, nullptr, memory.stream());
      // The receiver's stream writes first: what is received must not be overwritten by it.
      memory.enqueue_copy(buffer.data(), value.data(), value.n_bytes(), memory.stream());
      ASSERT_EQ(rank.post_and_wait(op), LOCKSTEP_OK) << rank.error();
      expect_all(buffer, 3.f, sends ? "sent" : "received");
      rank.meet();
    }
  });
}

// The second stream copies the result; the operation is late on one rank after the other.
TEST_P(EngineDeviceContract, AStreamThatWaitsForAnOperationSeesItsResult) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  on_all_sizes([&](Rank& rank) {
    testing::TestMemory& memory = *rank.memory();
    void* const second = memory.new_stream();
    for (const std::size_t count : kCounts) {
      for (int late = 0; late < rank.size(); ++late) {
        const Floats send(memory, count, 4.f), recv(memory, count, -1.f), copy(memory, count, -2.f);
        if (rank.rank() == late) memory.enqueue_call(sleep_a_while, nullptr, memory.stream());
        const lockstep_op op = all_reduce(rank, send, recv);
        auto* const handle = rank.post(op);
        ASSERT_EQ(rank.table().stream_wait(handle, second), LOCKSTEP_OK) << rank.failure().error;
        rank.table().release(handle);  // may follow at once
        memory.enqueue_copy(copy.data(), recv.data(), recv.n_bytes(), second);
        memory.synchronize(second);
        expect_all(copy, 4.f * static_cast<float>(rank.size()), base::cat("rank ", late, " was late"));
        rank.meet();
      }
    }
  });
}

// run orders its own stream: what the stream does next sees the result, and what it does after that is the
// next operation's input.
TEST_P(EngineDeviceContract, OperationsAndCopiesOfOneStreamFollowEachOther) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  on_all_sizes([&](Rank& rank) {
    constexpr int kRounds = 8;
    for (const std::size_t count : kCounts) {
      testing::TestMemory& memory = *rank.memory();
      const Floats a(memory, count, 1.f), b(memory, count, -1.f);
      char error[512] = "";
      float want = 1.f;
      for (int round = 0; round < kRounds; ++round) {
        const lockstep_op op = all_reduce(rank, a, b);
        if (rank.rank() == round % rank.size()) memory.enqueue_call(sleep_a_while, nullptr, memory.stream());
        ASSERT_EQ(rank.table().run(rank.comm(), &op, error, sizeof error), LOCKSTEP_OK) << error;
        memory.enqueue_copy(a.data(), b.data(), b.n_bytes(), memory.stream());
        want *= static_cast<float>(rank.size());
      }
      memory.synchronize(memory.stream());
      expect_all(a, want, base::cat(kRounds, " operations"));
      rank.meet();
    }
  });
}

TEST_P(EngineDeviceContract, RunReturnsWhileTheStreamIsStillBusy) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  if (GetParam().run_awaits_streams) GTEST_SKIP() << "this engine submits when all streams have arrived";
  if (engine().table().run == nullptr) GTEST_SKIP() << "this engine does not offer it";
  on_ranks(2, [&](Rank& rank) {
    for (const std::size_t count : kCounts) {
      testing::TestMemory& memory = *rank.memory();
      const Floats send(memory, count, 5.f), recv(memory, count, -1.f);
      Gate gate;
      memory.enqueue_call(Gate::hold, &gate, memory.stream());
      const lockstep_op op = all_reduce(rank, send, recv);
      char error[512] = "";
      EXPECT_EQ(rank.table().run(rank.comm(), &op, error, sizeof error), LOCKSTEP_OK) << error;
      EXPECT_FALSE(gate.was_forced()) << "run waited until the operation had completed";
      EXPECT_FALSE(memory.idle(memory.stream()));
      gate.open();
      memory.synchronize(memory.stream());
      expect_all(recv, 10.f, "after the gate");
      rank.meet();
    }
  });
}

// The second rank comes when the first one's stream is idle again.
TEST_P(EngineDeviceContract, TheStreamDoesNotWaitForAPostedOperation) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  on_ranks(2, [&](Rank& rank) {
    for (const std::size_t count : kCounts) {
      testing::TestMemory& memory = *rank.memory();
      const Floats send(memory, count, 6.f), recv(memory, count, -1.f), other(memory, count, 0.f);
      lockstep_handle* handle = nullptr;
      const lockstep_op op = all_reduce(rank, send, recv);
      if (rank.rank() == 0) {
        handle = rank.post(op);
        memory.enqueue_copy(other.data(), send.data(), send.n_bytes(), memory.stream());
        memory.synchronize(memory.stream());
        EXPECT_EQ(rank.table().test(handle), LOCKSTEP_PENDING);
      }
      rank.meet();
      if (rank.rank() == 1) handle = rank.post(op);
      EXPECT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
      expect_all(recv, 12.f, "of two");
      rank.meet();
    }
  });
}

// stream_wait may block until the operation fails, or return before: the stream continues in both cases, and the
// failure is known by then.
TEST_P(EngineDeviceContract, StreamsThatWaitForAFailedOperationContinue) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  for (const bool aborts : {true, false}) {
    on_ranks(2, [&](Rank& rank) {
      if (rank.rank() == 1) {  // never takes part
        rank.await(0, 1);
        if (aborts) rank.table().comm_abort(rank.comm(), "enough");
        return rank.await(0, 2);
      }
      testing::TestMemory& memory = *rank.memory();
      void* const second = memory.new_stream();
      const Floats send(memory, 1000, 1.f), recv(memory, 1000, 0.f), other(memory, 1000, 0.f);
      const lockstep_op op = all_reduce(rank, send, recv, aborts ? testing::kPatience : Milliseconds(40));
      auto* const handle = rank.post(op);
      rank.word(0) = 1;
      const auto want = aborts ? LOCKSTEP_ABORTED : LOCKSTEP_TIMEOUT;
      const auto status = rank.table().stream_wait(handle, second);
      EXPECT_TRUE(status == LOCKSTEP_OK || status == want) << "status " << status;
      memory.enqueue_copy(other.data(), send.data(), send.n_bytes(), second);
      memory.synchronize(second);
      expect_all(other, 1.f, "after the failure");
      EXPECT_EQ(rank.failure().status, want) << rank.failure().error;
      EXPECT_EQ(rank.finish(handle), want) << rank.error();
      // The operation's own stream: run orders it after an operation that can only fail.
      EXPECT_EQ(rank.run(op), want) << rank.error();
      memory.synchronize(memory.stream());
      rank.word(0) = 2;
    });
  }
}

// Two communicators, whose operations are posted in opposite order on the two ranks, in streams that wait for them.
TEST_P(EngineDeviceContract, StreamsOfTwoCommunicatorsDoNotWaitForEachOther) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  on_ranks(2, [&](Rank& rank) {
    testing::TestMemory& memory = *rank.memory();
    const auto other = rank.sub("other", {0, 1}, true);
    void* const streams[] = {memory.new_stream(), memory.new_stream()};
    const Floats send(memory, 3000, 1.f), first(memory, 3000, 0.f), second(memory, 3000, 0.f);
    for (int round = 0; round < 10; ++round) {
      testing::EngineRank* const ends[] = {&rank, &other->end};
      lockstep_handle* handles[2] = {};
      for (const int step : {0, 1}) {
        const int which = (step + rank.rank()) % 2;
        auto op = all_reduce(rank, send, which == 0 ? first : second);
        op.stream = streams[which];
        handles[which] = ends[which]->post(op);
      }
      for (const int which : {0, 1}) {
        ASSERT_EQ(rank.table().stream_wait(handles[which], streams[which]), LOCKSTEP_OK);
        ASSERT_EQ(ends[which]->finish(handles[which]), LOCKSTEP_OK) << ends[which]->error();
      }
      expect_all(first, 2.f, "the world");
      expect_all(second, 2.f, "the other");
    }
    rank.meet();
  });
}

TEST_P(EngineDeviceContract, MemoryOfTheEngineIsReducedInPlace) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  if (!has_alloc()) GTEST_SKIP() << "this engine does not offer it";
  on_all_sizes([&](Rank& rank) {
    for (const std::size_t count : kCounts) {
      const auto taken = rank.take_memory(count * sizeof(float));
      std::vector<float> host(count, 7.f);
      rank.memory()->copy_in(taken.second, host.data(), count * sizeof(float));
      auto op = Rank::op(LOCKSTEP_ALL_REDUCE, taken.second, taken.second, count);
      rank.memory()->place(op);
      for (const bool posted : {true, false}) ASSERT_EQ(rank.call(op, posted), LOCKSTEP_OK) << rank.error();
      rank.memory()->copy_out(host.data(), taken.second, count * sizeof(float));
      const auto size = static_cast<float>(rank.size());
      EXPECT_EQ(host.front(), 7.f * size * size);
      EXPECT_EQ(host.back(), 7.f * size * size);
      rank.meet();
      rank.give_memory(taken);
    }
  });
}

// What an engine must refuse, and stay well.
TEST_P(EngineDeviceContract, ADeviceThatIsNotThereIsRefused) {
  on_ranks(2, [&](Rank& rank) {
    const Floats buffer(*rank.memory(), 10, 1.f);
    for (const int device : {-1, 1000}) {
      auto op = all_reduce(rank, buffer, buffer);
      op.device = device;
      EXPECT_EQ(rank.run(op), LOCKSTEP_USAGE) << "device " << device << ": " << rank.error();
    }
    auto op = all_reduce(rank, buffer, buffer);
    op.device_kind = LOCKSTEP_DEVICE_KINDS;
    EXPECT_EQ(rank.run(op), LOCKSTEP_USAGE) << rank.error();
    EXPECT_EQ(rank.barrier(), LOCKSTEP_OK) << rank.error();
  });
}

}  // namespace
}  // namespace lockstep::comm
