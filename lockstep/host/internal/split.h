// How a communicator is created from ranks of another one: in the memory they share, without the store.
//
// Every member creates a block in its own arena and lists it in its arena header. The first member, rank 0 of
// the new communicator, looks up the blocks of all by their key, compares their members with its own, stores
// the offsets of all blocks, and gives each its verdict. So the others wait for one word, each is woken once,
// and the whole is linear in the number of members.
//
//   member:  create block, list it, wake the first ....... wait for verdict ..... read the offsets of all blocks
//   first:   create block ... find the block of each member ... store offsets, verdicts; wake all
//
// A member that is lost, has left the parent or was created with other members ends the wait of all. The
// store is used only for failures: the first member writes there why it gave up, for those that come later; a
// waiting member reads it four times a second.
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

// The key of a new communicator, unique among those of the progress service: the caller's key below that of
// the parent, since two parents may have children with equal keys; without one, random text that its rank 0
// publishes in the store (collective).
std::string split_key(const lockstep_comm_config& config, const std::string& parent_key);

// Collective over the members. Raises kTimeout naming who is missing and what they do instead, kPeerLost,
// kUsage when the members do not agree on who they are, kResource.
std::unique_ptr<CommMembers> split(const SplitOptions& options);

}  // namespace lockstep::comm::internal
