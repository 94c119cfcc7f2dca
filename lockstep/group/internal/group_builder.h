// From "these ranks, these back ends" to a joined group: stores, parts per engine, and what is announced to
// the others when joining fails. Torch-free. Private to group/.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/group/detail/engine_host.h"
#include "lockstep/group/detail/group_factory.h"
#include "lockstep/group/internal/backend_parts.h"

namespace lockstep::internal {

// Where a world stands: what all its groups are built on. Constant once the world is entered.
struct WorldSite {
  const char* what = "";  // the call that entered the world, for messages
  int rank = 0;
  int size = 1;
  std::shared_ptr<const WorldInfo> world{};  // of every group made here
  bool entered_before =
      false;  // this rank, over this store: its last world, or another process with its number
  std::shared_ptr<Store>
      store;  // the world's part of the rendezvous store; null in a world of one that has none
  std::shared_ptr<Store> base;    // the rendezvous store as it was given
  StoreHandles handles;           // handles on `store`
  std::shared_ptr<Store> root;    // a handle on the job's whole store
  std::vector<int> launch_ranks;  // what the launcher calls rank i of this world; -1: it does not know it
  BackendParts parts;             // of the default group
  std::vector<RankPlace> places;  // of each rank, when the back end was left to lockstep; else empty
  std::optional<int> device;      // the GPU that this rank is bound to (device_id)
  std::string engine_options;     // for engines of device memory (pg_options)
};

struct GroupRequest {
  const char* what;  // "new_group", for messages
  std::string name;
  std::string desc;
  Members members;
  Milliseconds timeout;
  Deadline deadline;   // of the joining
  BackendParts parts;  // empty: the site's default
  std::string folder;  // of the group's keys in the world's part; "" for the default group
  Group parent;        // as in EngineGroupOptions
};

// The timeout of a store's handle, whose own is `own`, while it is used for what must be over by the
// deadline.
Milliseconds within(Milliseconds own, Deadline deadline);
struct WorldSiteOptions {
  const char* what;
  int rank;
  int size;
  bool is_default;              // WorldInfo's
  std::shared_ptr<Store> base;  // may be null for a world of one
  std::string prefix;           // of the world's part of it
  Deadline deadline;
};
// Opens the handles that all groups of the world share, by the deadline.
WorldSite make_site(WorldSiteOptions options);
// Collective over all ranks: learns their places and chooses the site's parts by them. Raises kTimeout naming
// the ranks that did not come, kUsage when ranks were given different sizes.
void choose_by_places(WorldSite& site, Milliseconds timeout, Deadline deadline);
// Collective over the members, of which this rank is one. Raises kPeerLost naming the member that could not
// join.
Group build_group(const WorldSite& site, const GroupRequest& request);

}  // namespace lockstep::internal
