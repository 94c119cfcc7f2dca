#include "engines/nccl/options.h"

#include <charconv>
#include <cstdlib>
#include <sstream>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {
namespace {

int number_of(std::string_view name, std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size())
    base::raise(ErrorKind::kUsage, base::cat("NCCL option ", name, "=", text, ": not a number"));
  return number;
}

bool truth_of(std::string_view name, std::string_view text) {
  const int number = number_of(name, text);
  if (number != 0 && number != 1)
    base::raise(ErrorKind::kUsage, base::cat("NCCL option ", name, "=", text, ": neither 0 nor 1"));
  return number == 1;
}

void set(Options& options, std::string_view name, std::string_view value) {
  if (name == "blocking") {
    options.blocking = truth_of(name, value);
  } else if (name == "high_priority") {
    options.high_priority = truth_of(name, value);
  } else if (name == "net_name") {
    options.net_name = value;
  } else {
    struct Field {
      std::string_view name;
      int Config::*member;
    };
    constexpr Field kFields[] = {
        {"min_ctas", &Config::min_ctas},
        {"max_ctas", &Config::max_ctas},
        {"split_share", &Config::split_share},
        {"traffic_class", &Config::traffic_class},
        {"collnet", &Config::collnet_enable},
        {"nvls", &Config::nvls_ctas},
        {"cga_cluster_size", &Config::cga_cluster_size},
    };
    for (const Field& field : kFields) {
      if (field.name != name) continue;
      options.config.*field.member = number_of(name, value);
      return;
    }
    base::raise(ErrorKind::kUsage, base::cat("the nccl engine has no option \"", name, "\""));
  }
}

}  // namespace

Options Options::parse(const char* text) {
  Options options;
  const char* const high = std::getenv("TORCH_NCCL_HIGH_PRIORITY");
  options.high_priority = high != nullptr && std::string_view(high) == "1";
  std::istringstream words(text != nullptr ? text : "");
  for (std::string word; words >> word;) {
    const auto equals = word.find('=');
    if (equals == std::string::npos)
      base::raise(ErrorKind::kUsage, base::cat("NCCL option \"", word, "\": name=value is expected"));
    set(options, std::string_view(word).substr(0, equals), std::string_view(word).substr(equals + 1));
  }
  return options;
}

Config Options::nccl_config(const std::string& name) const {
  Config made = config;
  made.net_name = net_name.empty() ? nullptr : net_name.c_str();
  made.comm_name = name.empty() ? nullptr : name.c_str();
  return made;
}

}  // namespace lockstep::nccl_plugin
