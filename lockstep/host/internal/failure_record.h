// The group's first failure, written once in shared memory: when ranks fail one after the other, all of them
// report the first cause. Thread safety: any thread of any rank. Takes no lock, so it may be called while
// holding any.
#pragma once

#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/host/internal/comm_members.h"

namespace lockstep::comm::internal {

// Records `failure` unless another came first.
void write_failure_record(FailureRecord& record, const Failure& failure, int by_rank);
// Pre: it was written.
Failure read_failure_record(FailureRecord& record);
// Records `failure` unless another came first, then makes every rank stop. Kind, message and peer are kept.
void break_group(CommMembers& members, const Failure& failure);
// The first failure, or nothing while the group is intact. Waits for at most 50 ms for a rank that is writing
// it.
std::optional<Failure> first_failure(CommMembers& members);

}  // namespace lockstep::comm::internal
