// The words between the harness and a contender. A request is one line of key=value words
// ("kind=all_reduce place=staged bytes=4096 buffers=1 budget_ms=100"), the answer one line of JSON.
#pragma once

#include <cstdint>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

namespace bench {

class Request {
 public:
  explicit Request(const std::string& line) {
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      const auto equals = word.find('=');
      if (equals == std::string::npos) throw std::runtime_error("a request word without '=': " + word);
      values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }

  const std::string& text(const std::string& key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) throw std::runtime_error("the request lacks " + key + "=");
    return found->second;
  }
  // The same, or `fallback` when the request lacks it.
  std::string text(const std::string& key, const std::string& fallback) const {
    const auto found = values_.find(key);
    return found == values_.end() ? fallback : found->second;
  }
  std::int64_t number(const std::string& key) const { return std::stoll(text(key)); }

 private:
  std::map<std::string, std::string> values_;
};

// What a contender was started with, in the same words: "ranks=4".
inline Request arguments(int argc, char** argv) {
  std::string line;
  for (int k = 1; k < argc; ++k) line += std::string(argv[k]) + " ";
  return Request(line);
}

// {"error":"..."}; quotes and control characters become spaces.
inline std::string error_reply(std::string words) {
  for (char& c : words) {
    if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return "{\"error\":\"" + words + "\"}";
}

}  // namespace bench
