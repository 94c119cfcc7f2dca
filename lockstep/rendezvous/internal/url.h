// The parts of an init_method. Text is taken literally, without percent-decoding, as torch does.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace lockstep::internal {

struct Url {
  std::string text;                 // as given, for errors
  std::string scheme;               // "tcp"
  std::string host;                 // without the brackets of an IPv6 literal; "" when there is none
  std::optional<std::string> port;  // between ':' and the path; "" in "host:"
  std::string path;                 // with its '/'; "" when there is none
  std::map<std::string, std::string> query;

  // The value of `key` as a number from `low` to `high`, if it is there. Raises kUsage naming it.
  std::optional<long> number(const std::string& key, long low, long high) const;
};

// Raises kUsage naming the text when it is no URL, or gives a query key twice.
Url parse_url(const std::string& text);

// `text` as a number from `low` to `high`. Raises kUsage beginning with `what`.
long parse_number(const std::string& what, const std::string& text, long low, long high);

}  // namespace lockstep::internal
