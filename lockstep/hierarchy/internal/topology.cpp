#include "lockstep/hierarchy/internal/topology.h"

#include <algorithm>
#include <map>

namespace lockstep::comm::hierarchy {

// Hosts are numbered by their first rank, so every rank numbers them alike, whatever the identities say.
Topology Topology::of(const std::vector<std::string>& identities, int rank) {
  Topology out;
  out.rank = rank;
  out.size = static_cast<int>(identities.size());
  std::map<std::string, int> known;
  for (int r = 0; r < out.size; ++r) {
    const auto [found, fresh] = known.emplace(identities[static_cast<std::size_t>(r)], out.n_hosts());
    if (fresh) out.hosts.emplace_back();
    auto& ranks = out.hosts[static_cast<std::size_t>(found->second)];
    out.host_of.push_back(found->second);
    out.place_of.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(r);
  }
  out.even = std::ranges::all_of(out.hosts, [&](const auto& h) { return h.size() == out.hosts[0].size(); });
  return out;
}

std::vector<int> Topology::lane() const {
  std::vector<int> ranks;
  for (const auto& h : hosts) ranks.push_back(h[static_cast<std::size_t>(even ? place() : 0)]);
  return ranks;
}

}  // namespace lockstep::comm::hierarchy
