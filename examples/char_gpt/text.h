// The text to learn, and its characters as numbers.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace char_gpt {

// A file as it is. Of a folder: the prose of its documents (*.md and docs/*.md, without tables and code) and
// of the comments in the headers under lockstep/. Where that is too little to learn from, sentences made up
// here. Plain ASCII; the same on every rank.
std::string load_text(const std::filesystem::path& place);

// Numbers the different characters of a text from 0.
class Alphabet {
 public:
  explicit Alphabet(std::string_view text);
  std::int64_t size() const { return static_cast<std::int64_t>(characters_.size()); }
  // Characters that are not in the alphabet become its first.
  std::vector<std::int64_t> encode(std::string_view text) const;
  char decode(std::int64_t id) const { return characters_.at(static_cast<std::size_t>(id)); }

 private:
  std::string characters_;
  std::array<std::int64_t, 128> ids_{};
};

}  // namespace char_gpt
