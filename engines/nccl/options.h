// The settings of a communicator: lockstep_comm_config.options and the environment.
#pragma once

#include <string>
#include <string_view>

#include "engines/nccl/nccl_api.h"

namespace lockstep::nccl_plugin {

struct Options {
  // comm_create of a rank that has bound a device returns when NCCL's communicator is ready. NCCL itself never blocks:
  // a call that waits for a rank that does not come could not be ended.
  bool blocking = false;
  bool high_priority = false;  // of the streams that operations run on
  std::string net_name{};
  Config config{};  // net_name and comm_name are set by nccl_config()

  // "min_ctas=4 net_name=IB ..."; null is empty. Raises kUsage for an unknown name or a value that is not a number.
  // TORCH_NCCL_HIGH_PRIORITY sets high_priority unless the text does.
  static Options parse(const char* text);
  // For NCCL; refers to this object and to `name`.
  Config nccl_config(const std::string& name) const;
};

}  // namespace lockstep::nccl_plugin
