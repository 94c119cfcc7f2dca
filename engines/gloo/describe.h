// Operations as text, and what the ranks exchange about them before any data moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/engine/plugin.h"

namespace lockstep::gloo_plugin {

using comm::has_reduce;
using comm::has_root;
using comm::is_point_to_point;
using comm::size_of;

// One rank's call, as sent to the others. Plain bytes between machines of one kind (gloo's own preambles are
// so too).
struct CallHeader {
  std::uint64_t sequence = 0;
  std::uint32_t kind = 0, dtype = 0, reduce = 0;
  std::int32_t root = 0;
  std::uint64_t count = 0;
  std::uint64_t counts_hash = 0;  // ALL_GATHER_V: of all counts
  std::uint64_t for_you = 0;      // bytes that follow for the rank it is sent to
  std::uint64_t data_slot = 0;    // SEND: under which the data comes
  std::uint64_t number = 0;       // its caller's, for messages and compared; 0: none
  char where[64] = {};
};
static_assert(sizeof(CallHeader) == 128);

// Fields that mean nothing for the kind are left alike on all ranks.
CallHeader describe(const lockstep_op& op, std::uint64_t sequence, int size);
// True when two ranks' calls belong together.
bool match(const CallHeader& mine, const CallHeader& theirs);
// "all_reduce(sum, f32, 8 elements) #3 at train.cpp:12". The call may come from a peer: every field is
// checked.
std::string text_of(const CallHeader& call);

}  // namespace lockstep::gloo_plugin
