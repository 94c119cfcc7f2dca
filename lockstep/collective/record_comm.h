// Names operations for profilers: operations that are started in a scope appear under its name.
//
//   const auto named = lockstep::record_comm("layer 1: gather weights");
//   lockstep::all_gather_single(output, input);  // an event of that name instead of "lockstep:all_gather..."
//
// Thread safety: a scope names the operations of the thread that opened it, and ends on that thread. Scopes
// nest.
#pragma once

#include <string>
#include <utility>

namespace lockstep {

class [[nodiscard]] CommRecord {
 public:
  explicit CommRecord(std::string name);
  ~CommRecord();
  CommRecord(const CommRecord&) = delete;
  CommRecord& operator=(const CommRecord&) = delete;

 private:
  const std::string name_;
  const std::string* const before_;
};
// Operations started by this thread have this name until the returned object is destroyed.
inline CommRecord record_comm(std::string name) {
  return CommRecord(std::move(name));
}

namespace internal {
// The innermost scope's name on this thread; null outside of any.
const std::string* comm_name() noexcept;
}  // namespace internal

}  // namespace lockstep
