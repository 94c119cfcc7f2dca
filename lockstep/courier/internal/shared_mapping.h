// Segments that couriers share. A segment made in this process is mapped once, however often its descriptor comes back
// from another courier of the process: two mappings of one page look to TSan like memory without synchronisation, and
// would cost address space. Process-wide, because couriers in threads know nothing of each other.
// Thread safety: every function.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "lockstep/base/fd.h"
#include "lockstep/net/segment.h"

namespace lockstep::courier::internal {

using Mapping = std::shared_ptr<net::Segment>;

Mapping create_mapping(const std::string& name, std::size_t n_bytes);
// Raises as Segment::from_fd.
Mapping map_descriptor(Fd fd, std::size_t n_bytes);

}  // namespace lockstep::courier::internal
