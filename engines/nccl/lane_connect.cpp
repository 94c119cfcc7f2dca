// How the ranks of a lane make their NCCL communicator. Each says which GPU it uses; the first one checks that they differ
// and answers with the unique id, or with why there is none: a refusal reaches every rank.
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#include "engines/cuda/identity.h"
#include "engines/nccl/lane.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {
namespace {

using base::cat;

bool shares_gpus(const Library& nccl) {
  const char* const value = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return nccl.version >= kMultiRankGpuVersion && value != nullptr && std::string_view(value) == "1";
}

}  // namespace

std::string Lane::key(const char* what, std::size_t index) const {
  return cat("nccl/lane/", name_, '/', what, '/', index);
}

bool Lane::step_connect() {
  switch (state_) {
    case State::kIdle:
      stream_ = cuda::create_stream(
          context_.gpu, context_.options.high_priority ? cuda::Priority::kGreatest : cuda::Priority::kLeast);
      announce_gpu();
      return true;
    case State::kGathering:
      return gather_gpus();
    case State::kAwaitingId:
      return await_id();
    case State::kInitialising:
      return end_init();
    default:
      return false;
  }
}

// Messages of a rank to itself are copies: no communicator.
void Lane::announce_gpu() {
  if (ranks_.size() == 1 && name_ == "self") {
    state_ = State::kReady;
    ready_.store(true, std::memory_order_release);
    return;
  }
  const std::string gpu = cuda::to_text(context_.gpu.uuid());
  gpus_ = {gpu};
  if (ranks_.size() > 1) context_.peers.store().set(key("gpu", static_cast<std::size_t>(own_)), gpu);
  state_ = own_ == 0 ? State::kGathering : State::kAwaitingId;
}

bool Lane::gather_gpus() {
  while (gpus_.size() < ranks_.size()) {
    auto text = context_.peers.store().look(key("gpu", gpus_.size()));
    if (!text) return false;
    gpus_.push_back(std::move(*text));
  }
  std::map<std::string, std::size_t> users;
  std::string refusal;
  for (std::size_t i = 0; i < gpus_.size(); ++i) {
    const auto [first, is_new] = users.emplace(gpus_[i], i);
    if (!is_new && refusal.empty())
      refusal = cat(context_.peers.who(ranks_[first->second]), " and ", context_.peers.who(ranks_[i]),
                    " use the same GPU; NCCL needs one for each rank");
  }
  if (!refusal.empty() && shares_gpus(context_.nccl)) {
    context_.peers.store().log(1,
                               cat(refusal, ", but NCCL_MULTI_RANK_GPU_ENABLE allows it: slow without MPS"));
    refusal.clear();
  }
  UniqueId id{};
  if (refusal.empty()) {
    check(context_.nccl.get_unique_id(&id), "ncclGetUniqueId");
  } else {
    refusal += ": bind each to its own, or use the engine cuda_ipc";
  }
  if (ranks_.size() > 1)
    context_.peers.store().set(key("id", 0), refusal.empty()
                                                 ? cat('+', std::string_view(id.bytes, sizeof id.bytes))
                                                 : cat('-', refusal));
  if (!refusal.empty()) base::raise(ErrorKind::kUnsupported, refusal, ErrorFamily::kBackend);
  begin_init(id);
  return true;
}

bool Lane::await_id() {
  const auto text = context_.peers.store().look(key("id", 0));
  if (!text || text->empty()) return false;
  if (text->front() == '-') base::raise(ErrorKind::kUnsupported, text->substr(1), ErrorFamily::kBackend);
  UniqueId id{};
  if (text->size() != 1 + sizeof id.bytes)
    base::raise(ErrorKind::kInternal, "the unique id in the group's store has a wrong length",
                ErrorFamily::kBackend);
  std::memcpy(id.bytes, text->data() + 1, sizeof id.bytes);
  begin_init(id);
  return true;
}

void Lane::begin_init(const UniqueId& id) {
  Config config = context_.options.nccl_config(name_);
  check(context_.nccl.comm_init_rank_config(&comm_, static_cast<int>(ranks_.size()), id, own_, &config),
        "ncclCommInitRankConfig");
  state_ = State::kInitialising;
}

bool Lane::end_init() {
  Result now = kSuccess;
  check(context_.nccl.comm_get_async_error(comm_, &now), "ncclCommGetAsyncError");
  check(now, "ncclCommInitRankConfig");
  if (now == kInProgress) return false;
  state_ = State::kReady;
  ready_.store(true, std::memory_order_release);
  return true;
}

}  // namespace lockstep::nccl_plugin
