// lockstep's built-in engine, called through its table as the process group calls it, without tensors.
// place=zero_copy: memory from the engine's alloc; place=staged: ordinary memory.
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "benchmarks/all_reduce/measure.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/common/shared_kv.h"
#include "lockstep/host/host.h"

namespace bench {
namespace {

constexpr std::int64_t kMinute = 60'000'000'000;

class LockstepEngine {
 public:
  LockstepEngine(const Link& link, const lockstep_host* host) : engine_(*lockstep::comm::host_engine()) {
    char words[1024] = "";
    const lockstep_comm_config config{.struct_size = sizeof(lockstep_comm_config),
                                      .host = host,
                                      .rank = link.rank(),
                                      .size = link.size(),
                                      .name = "bench",
                                      .deadline_ns = now_ns() + kMinute};
    if (engine_.comm_create(&config, &comm_, words, sizeof(words)) != LOCKSTEP_OK)
      throw std::runtime_error(words);
  }
  ~LockstepEngine() {
    places_.clear();
    engine_.comm_destroy(comm_, nullptr);
  }
  LockstepEngine(const LockstepEngine&) = delete;
  LockstepEngine& operator=(const LockstepEngine&) = delete;

  void prepare(const std::string& place, std::size_t n_bytes, std::size_t n_buffers) {
    current_ = &places_[place];
    if (current_->n_bytes == n_bytes && current_->buffers.size() == n_buffers) return;
    current_->buffers.clear();
    current_->n_bytes = n_bytes;
    for (std::size_t i = 0; i < n_buffers; ++i) current_->buffers.push_back(allocate(place, n_bytes));
  }

  std::span<float> buffer(std::size_t i) {
    return {current_->buffers[i].get(), current_->n_bytes / sizeof(float)};
  }

  void all_reduce(std::size_t i) {
    float* const values = current_->buffers[i].get();
    const lockstep_op op{.struct_size = sizeof(lockstep_op),
                         .kind = LOCKSTEP_ALL_REDUCE,
                         .dtype = LOCKSTEP_F32,
                         .reduce = LOCKSTEP_SUM,
                         .root = 0,
                         .send = values,
                         .recv = values,
                         .count = current_->n_bytes / sizeof(float),
                         .deadline_ns = LOCKSTEP_NEVER,
                         .where = nullptr};
    char words[1024];
    if (engine_.run(comm_, &op, words, sizeof(words)) != LOCKSTEP_OK) throw std::runtime_error(words);
  }

 private:
  using Buffer = std::unique_ptr<float, std::function<void(void*)>>;
  struct Place {
    std::size_t n_bytes = 0;
    std::vector<Buffer> buffers;
  };

  Buffer allocate(const std::string& place, std::size_t n_bytes) {
    if (place == "zero_copy") {
      void* memory = nullptr;
      if (engine_.alloc(comm_, n_bytes, &memory) != LOCKSTEP_OK)
        throw std::runtime_error("the engine has no memory");
      return {static_cast<float*>(memory), [this](void* p) { engine_.free(comm_, p); }};
    }
    void* memory = std::aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    if (memory == nullptr) throw std::bad_alloc();
    return {static_cast<float*>(memory), [](void* p) { std::free(p); }};
  }

  const lockstep_engine& engine_;
  lockstep_comm* comm_ = nullptr;
  std::map<std::string, Place> places_;  // the last size of each place stays allocated between rounds
  Place* current_ = nullptr;
};

}  // namespace
}  // namespace bench

int main() {
  bench::SharedKv kv;
  const auto link = bench::fork_ranks(2);
  bench::bind_to_core(link->rank());
  bench::LockstepEngine engine(*link, kv.host());
  return bench::serve(*link, [&](const bench::Request& request) {
    return bench::measure_all_reduce(engine, *link, request);
  });
}
