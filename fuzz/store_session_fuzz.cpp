// Feeds bytes to the store server's request machine, without a socket: the first byte says how the rest is cut into
// reads. Two sessions share the data, so that one wakes the other.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "lockstep/store/internal/tcp_session.h"

using lockstep::internal::TcpSession;
using lockstep::internal::TcpShared;

namespace {

const lockstep::TcpStoreLimits kLimits{.key_bytes = 1 << 10,
                                       .value_bytes = 1 << 16,
                                       .keys_per_request = 64,
                                       .total_bytes = 1 << 20,
                                       .reply_bytes = 1 << 18};

void validate(TcpSession& session) {
  const std::uint8_t magic[] = {0, 0xCE, 0xF7, 0x85, 0x3C};
  if (!session.feed(magic) || !session.validated()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  TcpShared shared(kLimits, std::nullopt);
  std::uint64_t left_after = 0;
  {
    std::optional<TcpSession> sessions[2];
    for (auto& session : sessions) session.emplace(shared);
    if ((data[0] & 1) == 0) std::ranges::for_each(sessions, [](auto& session) { validate(*session); });
    const std::size_t step = std::max<std::size_t>(1, data[0] >> 2);
    std::span<const std::uint8_t> rest(data + 1, size - 1);
    for (int turn = 0; !rest.empty(); ++turn) {
      const auto part = rest.first(std::min(step, rest.size()));
      rest = rest.subspan(part.size());
      auto& session = sessions[(data[0] & 2) != 0 ? turn % 2 : 0];
      if (session && !session->feed(part)) session.reset();
      while (!shared.woken.empty()) {
        auto* woken = shared.woken.back();
        shared.woken.pop_back();
        if (!woken->go_on()) sessions[woken == &*sessions[0] ? 0 : 1].reset();
      }
      for (auto& one : sessions) {
        if (one) one->output().clear();
      }
      if (shared.quota.used > kLimits.total_bytes) std::abort();
    }
    left_after = shared.data.n_keys();
  }
  // All that is still on the account is stored.
  if (left_after == 0 && shared.data.n_keys() != 0) std::abort();
  return 0;
}
