// How the contract suite starts ranks. The tests themselves are in engine_contract_*.cpp.
#include "lockstep/engine/engine_contract.h"
#include "lockstep/base/detail/raise.h"

#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

namespace lockstep::comm {

void ContractRank::meet() {
  const std::uint32_t round = board_.round.load();
  if (board_.arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(size())) {
    board_.arrived = 0;
    board_.round = round + 1;
    return;
  }
  const Deadline patience = Deadline::after(testing::kPatience);
  while (board_.round.load() == round) {
    if (patience.expired()) base::raise(ErrorKind::kTimeout, "the other ranks did not come");
    ::sched_yield();
  }
}

void ContractRank::await(int index, std::uint64_t value) {
  const Deadline patience = Deadline::after(testing::kPatience);
  while (word(index).load() < value) {
    if (patience.expired())
      base::raise(ErrorKind::kTimeout, base::cat("word ", index, " did not become ", value));
    ::sched_yield();
  }
}

std::unique_ptr<ContractRank::Member> ContractRank::sub(const std::string& name,
                                                        const std::vector<int>& members, bool parent) {
  const auto place = std::find(members.begin(), members.end(), rank());
  if (place == members.end()) base::raise(ErrorKind::kUsage, "only members make a communicator");
  return std::make_unique<Member>(
      table(), kv_, name, static_cast<int>(place - members.begin()), static_cast<int>(members.size()),
      Options{.name = name,
              .parent = parent ? comm() : nullptr,
              .parent_ranks = std::vector<std::int32_t>(members.begin(), members.end()),
              .memory = memory()});
}

void EngineContract::SetUp() {
  const lockstep_engine* const table = GetParam().table();
  if (table == nullptr) GTEST_SKIP() << "this engine is not here";
  engine_ = std::make_unique<Engine>(table, GetParam().name);
}

void EngineContract::clear_board() {
  for (auto& word : board_->words) word = 0;
  board_->arrived = 0;
  board_->round = 0;
}

void EngineContract::be(int rank, int size, testing::Kv& kv, const Body& body) {
  try {
    if (GetParam().enter) GetParam().enter(rank, size);
    testing::KvSpace space(kv, "world");
    const auto memory = on_device() ? GetParam().memory(rank, size) : nullptr;
    Rank end(engine_->table(), kv, space, *board_, rank, size, memory.get());
    body(end);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank << " of " << size << ": " << error.what();
  }
}

void EngineContract::on_ranks(int size, const Body& body) {
  if (processes()) {
    for (const pid_t pid : start_processes(size, body)) {
      EXPECT_EQ(end_of(pid), "exited with code 0") << "one of " << size << " processes";
    }
    return;
  }
  clear_board();
  testing::MapKv kv;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back([&, r] { be(r, size, kv, body); });
  for (auto& thread : threads) thread.join();
}

std::vector<pid_t> EngineContract::start_processes(int size, const Body& body) {
  clear_board();
  kv_ = std::make_unique<testing::FolderKv>();
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  for (int r = 0; r < size; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      be(r, size, *kv_, body);
      std::fflush(nullptr);
      ::_exit(HasFailure() ? 1 : 0);
    }
    pids.push_back(pid);
  }
  return pids;
}

std::string EngineContract::end_of(pid_t pid) {
  const int status = fork_testing::status_of(pid);
  return status == -1 ? "did not end" : base::describe_wait_status(status);
}

}  // namespace lockstep::comm
