// lockstep's built-in engine, called through its table as the process group calls it, without tensors.
// place=zero_copy: memory from the engine's alloc; place=staged: ordinary memory.
#include <map>
#include <stdexcept>

#include "benchmarks/collective/buffers.h"
#include "benchmarks/collective/measure.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/common/shared_kv.h"
#include "lockstep/host/host.h"

namespace bench {
namespace {

constexpr std::int64_t kMinute = 60'000'000'000;

lockstep_op_kind engine_kind(Kind kind) {
  switch (kind) {
    case Kind::kBarrier:
      return LOCKSTEP_BARRIER;
    case Kind::kBroadcast:
      return LOCKSTEP_BROADCAST;
    case Kind::kAllReduce:
      return LOCKSTEP_ALL_REDUCE;
    case Kind::kReduce:
      return LOCKSTEP_REDUCE;
    case Kind::kAllGather:
      return LOCKSTEP_ALL_GATHER;
    case Kind::kGather:
      return LOCKSTEP_GATHER;
    case Kind::kReduceScatter:
      return LOCKSTEP_REDUCE_SCATTER;
    case Kind::kScatter:
      return LOCKSTEP_SCATTER;
    case Kind::kAllToAll:
      return LOCKSTEP_ALL_TO_ALL;
    case Kind::kSendRecv:
    case Kind::kExchange:
      return LOCKSTEP_SEND;
  }
  throw std::logic_error("a kind without a name");
}

// The engine counts whole buffers where there is one size, and blocks where there are two or one per peer.
std::uint64_t engine_count(const Case& which) {
  const KindRow& row = which.row();
  const bool blocks =
      row.send != Extent::kWhole || row.recv != Extent::kWhole || which.kind == Kind::kAllToAll;
  return which.kind == Kind::kBarrier ? 0 : blocks ? which.n_block() : which.n_whole();
}

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

  bool prepare(const Case& which) {
    buffers_ = &places_[which.place];
    const bool fresh =
        buffers_->prepare(which, [&](std::size_t n_bytes) { return allocate(which.place, n_bytes); });
    const bool two_sided = which.kind == Kind::kSendRecv || which.kind == Kind::kExchange;
    op_ = {.struct_size = sizeof(lockstep_op),
           .kind = engine_kind(which.kind),
           .dtype = LOCKSTEP_F32,
           .reduce = LOCKSTEP_SUM,
           .root = two_sided ? which.partner() : 0,
           .send = nullptr,
           .recv = nullptr,
           .count = engine_count(which),
           .deadline_ns = LOCKSTEP_NEVER,
           .where = nullptr};
    return fresh;
  }

  std::span<float> send(std::size_t i) { return buffers_->send(i); }
  std::span<float> recv(std::size_t i) { return buffers_->recv(i); }

  void run(std::size_t i) {
    op_.send = send(i).data();
    op_.recv = recv(i).data();
    const Case& which = buffers_->which();
    if (which.kind == Kind::kExchange) return exchange();
    if (which.kind != Kind::kSendRecv) return run(op_);
    const bool first = which.rank < which.partner();
    run(one_sided(first ? LOCKSTEP_SEND : LOCKSTEP_RECV));
    run(one_sided(first ? LOCKSTEP_RECV : LOCKSTEP_SEND));
  }

  void barrier() {
    const lockstep_op op{
        .struct_size = sizeof(lockstep_op), .kind = LOCKSTEP_BARRIER, .deadline_ns = LOCKSTEP_NEVER};
    run(op);
  }

 private:
  lockstep_op one_sided(lockstep_op_kind kind) const {
    lockstep_op op = op_;
    op.kind = kind;
    if (kind == LOCKSTEP_SEND) op.recv = nullptr;
    if (kind == LOCKSTEP_RECV) op.send = nullptr;
    return op;
  }

  void exchange() {
    const lockstep_op sending = one_sided(LOCKSTEP_SEND);
    lockstep_handle* handle = nullptr;
    if (engine_.post(comm_, &sending, &handle) != LOCKSTEP_OK)
      throw std::runtime_error("the send was refused");
    run(one_sided(LOCKSTEP_RECV));
    const lockstep_status status = engine_.wait(handle, LOCKSTEP_NEVER);
    engine_.release(handle);
    if (status != LOCKSTEP_OK) throw std::runtime_error("the send failed");
  }

  void run(const lockstep_op& op) {
    char words[1024];
    if (engine_.run(comm_, &op, words, sizeof(words)) != LOCKSTEP_OK) throw std::runtime_error(words);
  }

  Buffers::Memory allocate(const std::string& place, std::size_t n_bytes) {
    if (place != "zero_copy") return Buffers::ordinary(n_bytes);
    void* memory = nullptr;
    if (engine_.alloc(comm_, n_bytes, &memory) != LOCKSTEP_OK)
      throw std::runtime_error("the engine has no memory");
    return {static_cast<float*>(memory), [this](void* p) { engine_.free(comm_, p); }};
  }

  const lockstep_engine& engine_;
  lockstep_comm* comm_ = nullptr;
  std::map<std::string, Buffers> places_;  // the last size of each place stays allocated between rounds
  Buffers* buffers_ = nullptr;
  lockstep_op op_{};
};

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  const bench::Request arguments = bench::arguments(argc, argv);
  bench::SharedKv kv;
  const auto link = bench::fork_ranks(static_cast<int>(arguments.number("ranks")));
  bench::bind_to_core(link->rank());
  return bench::guarded(*link, [&] {
    bench::LockstepEngine engine(*link, kv.host());
    return bench::serve(
        *link, [&](const bench::Request& request) { return bench::measure(engine, *link, request); });
  });
}
