#include "tests/fake_nccl/world.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fake_cuda/fake_cuda.h"

namespace lockstep::fake_nccl {
namespace {

// NCCL would hang or write past a buffer.
[[noreturn]] void misfit(const char* what) {
  std::fprintf(stderr, "fake NCCL: %s\n", what);
  std::abort();
}

char* at(void* device, std::size_t n_bytes) {
  return static_cast<char*>(fake_cuda_host(device)) + n_bytes;
}
const char* at(const void* device, std::size_t n_bytes) {
  return static_cast<const char*>(fake_cuda_host(device)) + n_bytes;
}

}  // namespace

void World::arrive(int rank, Task& task) {
  if (task.kind == Kind::kSend || task.kind == Kind::kRecv) {
    const bool is_send = task.kind == Kind::kSend;
    const std::pair pair(is_send ? rank : task.root, is_send ? task.root : rank);
    (is_send ? sends : receives)[pair].push_back(&task);
    return match(pair);
  }
  auto& all = collectives[task.number];
  all[rank] = &task;
  if (static_cast<int>(all.size()) < size) return;
  perform(all);
  for (const auto& [each, theirs] : all) theirs->done = true;
  collectives.erase(task.number);
  changed.notify_all();
}

void World::withdraw(int rank, Task& task) {
  if (task.done) return;
  if (task.kind == Kind::kSend || task.kind == Kind::kRecv) {
    for (auto* const queues : {&sends, &receives}) {
      for (auto& [pair, queue] : *queues) std::erase(queue, &task);
    }
  } else if (const auto found = collectives.find(task.number); found != collectives.end()) {
    found->second.erase(rank);
  }
}

void World::match(const std::pair<int, int>& pair) {
  auto &out = sends[pair], &in = receives[pair];
  while (!out.empty() && !in.empty()) {
    Task &from = *out.front(), &to = *in.front();
    const std::size_t n_bytes = from.count * size_of(from.type);
    if (n_bytes != to.count * size_of(to.type)) misfit("a receive of another size than its send");
    std::memcpy(at(to.recv, 0), at(from.send, 0), n_bytes);
    from.done = to.done = true;
    out.pop_front();
    in.pop_front();
    changed.notify_all();
  }
}

// All ranks wait inside their kernels, so that their buffers are at rest. What is written may be what is read: results are
// made aside first.
void World::perform(const std::map<int, Task*>& all) {
  const Task& first = *all.begin()->second;
  for (const auto& [rank, task] : all) {
    if (task->kind != first.kind || task->count != first.count || task->type != first.type ||
        task->op != first.op || task->root != first.root)
      misfit("ranks called different collectives");
  }
  const std::size_t width = size_of(first.type), n_bytes = first.count * width, n = all.size();
  const std::size_t n_elements = first.kind == Kind::kReduceScatter ? first.count * n : first.count;
  std::vector<char> result(std::max(n_bytes * n, std::size_t{1}));
  std::vector<const void*> from;
  for (const auto& [rank, task] : all) from.push_back(at(task->send, 0));
  switch (first.kind) {
    case Kind::kBroadcast:
      std::memcpy(result.data(), from[static_cast<std::size_t>(first.root)], n_bytes);
      break;
    case Kind::kAllGather:
      for (std::size_t r = 0; r < n; ++r) std::memcpy(result.data() + r * n_bytes, from[r], n_bytes);
      break;
    default:
      reduce(first.type, first.op, from, result.data(), n_elements);
      break;
  }
  for (const auto& [rank, task] : all) {
    if (first.kind == Kind::kReduce && rank != first.root) continue;
    const std::size_t part =
        first.kind == Kind::kReduceScatter ? static_cast<std::size_t>(rank) * n_bytes : 0;
    std::memcpy(at(task->recv, 0), result.data() + part,
                first.kind == Kind::kAllGather ? n_bytes * n : n_bytes);
  }
}

void run(const FakeComm::Launch& launch) {
  FakeComm& comm = *launch.comm;
  World& world = *comm.world;
  std::vector<Task> tasks = launch.tasks;
  ++comm.running;
  {
    std::unique_lock lock(world.mutex);
    for (Task& task : tasks) {
      if (comm.aborted) break;
      if (task.kind != Kind::kSend && task.kind != Kind::kRecv) task.number = ++comm.n_collectives;
      world.arrive(comm.rank, task);
    }
    world.changed.wait(lock, [&] {
      return comm.aborted || std::ranges::all_of(tasks, [](const Task& task) { return task.done; });
    });
    for (Task& task : tasks) world.withdraw(comm.rank, task);
  }
  --comm.running;
}

}  // namespace lockstep::fake_nccl
