// Who is where: the ranks of a group by host. A pure function of what the ranks said about themselves.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::comm::hierarchy {

struct Topology {
  int rank = 0;
  int size = 0;
  // Ranks by host, ascending; hosts in the order of their first rank.
  std::vector<std::vector<int>> hosts;
  std::vector<int> host_of;   // by rank
  std::vector<int> place_of;  // by rank: its index among the ranks of its host
  // Every host has the same number of ranks: lanes are the ranks of equal place. Else one lane of places 0.
  bool even = false;

  // identities[r]: what rank r said.
  static Topology of(const std::vector<std::string>& identities, int rank);

  int n_hosts() const { return static_cast<int>(hosts.size()); }
  int host() const { return host_of[static_cast<std::size_t>(rank)]; }
  int place() const { return place_of[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& neighbours() const { return hosts[static_cast<std::size_t>(host())]; }
  int n_local() const { return static_cast<int>(neighbours().size()); }
  bool has_lane() const { return even || place() == 0; }
  // The ranks of this rank's lane, by host. Pre: has_lane().
  std::vector<int> lane() const;
  bool one_host() const { return n_hosts() == 1; }
  bool one_rank_each() const { return n_hosts() == size; }
};

}  // namespace lockstep::comm::hierarchy
