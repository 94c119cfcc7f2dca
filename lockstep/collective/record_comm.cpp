#include "lockstep/collective/record_comm.h"

namespace lockstep {
namespace {

thread_local const std::string* innermost_name = nullptr;

}  // namespace

CommRecord::CommRecord(std::string name) : name_(std::move(name)), before_(innermost_name) {
  innermost_name = &name_;
}

CommRecord::~CommRecord() {
  innermost_name = before_;
}

const std::string* internal::comm_name() noexcept {
  return innermost_name;
}

}  // namespace lockstep
