// Feeds bytes to the store server's request machine, without a socket: the first byte says how the rest is
// cut into reads. Two sessions share the data, so that one wakes the other.
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

// As the server does it; a session that fails is ended.
void serve_woken(TcpShared& shared) {
  while (!shared.woken.empty()) {
    TcpSession* session = shared.woken.back();
    shared.woken.pop_back();
    if (!session->go_on()) static_cast<std::optional<TcpSession>*>(session->owner())->reset();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  TcpShared shared(kLimits, std::nullopt);
  {
    std::optional<TcpSession> sessions[2];
    for (auto& session : sessions) session.emplace(shared, &session);
    if ((data[0] & 1) == 0) std::ranges::for_each(sessions, [](auto& session) { validate(*session); });
    const std::size_t step = std::max<std::size_t>(1, data[0] >> 2);
    std::span<const std::uint8_t> rest(data + 1, size - 1);
    for (int turn = 0; !rest.empty(); ++turn) {
      const auto part = rest.first(std::min(step, rest.size()));
      rest = rest.subspan(part.size());
      auto& session = sessions[(data[0] & 2) != 0 ? turn % 2 : 0];
      if (session && !session->feed(part)) session.reset();
      serve_woken(shared);
      for (auto& one : sessions) {
        if (one) one->output().clear();
      }
      if (shared.quota.used > kLimits.total_bytes) std::abort();
    }
  }
  // With the sessions gone, what is on the account is what is stored.
  if (shared.quota.used != shared.data.count_bytes() || shared.unsent.used != 0) std::abort();
  return 0;
}
