// How a communicator is made of ranks of another one: in the memory they share, without the store.
//
// Every member makes a block in its own arena and lists it in its arena header. The first member, rank 0 of the new
// communicator, looks up the blocks of all by their key, compares their members with its own, writes down where the
// blocks lie, and gives each its verdict. So the others wait for one word, each is woken once, and the whole is linear in
// the number of members.
//
//   member:  make block, list it, ring the first ......... wait for verdict ..... read where all blocks are
//   first:   make block ... find the block of each member ... write table, verdicts; ring all
//
// A member that is lost, has left the parent or was told other members ends the wait of all. The store is used for failures
// alone: the first member says there why it gave up, for those that come later, and who waits looks four times a second.
#pragma once

#include <memory>
#include <string>

#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/internal/comm_members.h"
#include "lockstep/host/internal/progress_service.h"

namespace lockstep::comm::internal {

struct SplitOptions {
  ProgressService& service;
  CommMembers& parent;
  const lockstep_comm_config& config;  // with a parent
  const std::string& key;  // alike on the members, never used before on this progress service: from split_key
};

// What a new communicator is called among all of its progress service: by the caller's key, under that of the parent, since two parents
// may have children of equal keys; without one, by a random text that its rank 0 publishes in the store (collective).
std::string split_key(const lockstep_comm_config& config, const std::string& parent_key);

// Collective over the members. Raises kTimeout naming who is missing and what they do instead, kPeerLost, kUsage when the
// members do not agree on who they are, kResource.
std::unique_ptr<CommMembers> split(const SplitOptions& options);

}  // namespace lockstep::comm::internal
