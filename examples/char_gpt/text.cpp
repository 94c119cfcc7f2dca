#include "examples/char_gpt/text.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <sstream>

namespace char_gpt {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kEnough = 20'000;

std::string read(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Files of a folder by name, so that all ranks and all runs see one order.
std::vector<fs::path> files(const fs::path& folder, const std::string& extension) {
  std::set<fs::path> found;
  std::error_code none;  // a folder that is not there has no files
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    if (entry.is_regular_file() && entry.path().extension() == extension) found.insert(entry.path());
  }
  return {found.begin(), found.end()};
}

std::string prose_of_document(const fs::path& file) {
  std::istringstream in(read(file));
  std::string prose;
  bool in_code = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```")) in_code = !in_code;
    if (!in_code && !line.starts_with("```") && !line.starts_with("|") && !line.starts_with("<!--")) {
      prose += line + "\n";
    }
  }
  return prose + "\n";
}

std::string comments_of_header(const fs::path& file) {
  std::istringstream in(read(file));
  std::string prose;
  for (std::string line; std::getline(in, line);) {
    const auto begin = line.find_first_not_of(' ');
    if (begin != std::string::npos && line.compare(begin, 3, "// ") == 0)
      prose += line.substr(begin + 3) + "\n";
  }
  return prose + "\n";
}

std::string prose_of_folder(const fs::path& folder) {
  std::string prose;
  for (const auto& file : files(folder, ".md")) prose += prose_of_document(file);
  for (const auto& file : files(folder / "docs", ".md")) prose += prose_of_document(file);
  std::set<fs::path> parts;
  std::error_code none;
  for (const auto& part : fs::directory_iterator(folder / "lockstep", none)) parts.insert(part.path());
  for (const auto& part : parts) {
    for (const auto& file : files(part, ".h")) prose += comments_of_header(file);
  }
  return prose;
}

std::string made_up_sentences() {
  const std::vector<std::string> who{"a rank",     "the group", "the engine",
                                     "every peer", "the store", "a bucket"};
  const std::vector<std::string> does{"waits for", "reduces", "holds", "shares", "names", "never copies"};
  const std::vector<std::string> what{"the gradients", "its slice", "the last step", "a segment",
                                      "the error"};
  const std::vector<std::string> when{"in order", "before the barrier", "at once", "after the backward pass"};
  std::mt19937 random(1);  // its numbers are the same everywhere, unlike the standard distributions'
  const auto pick = [&](const std::vector<std::string>& words) { return words[random() % words.size()]; };
  std::string text;
  while (text.size() < 3 * kEnough) {
    text +=
        pick(who) + " " + pick(does) + " " + pick(what) + " " + pick(when) + (random() % 4 ? ". " : ".\n");
  }
  return text;
}

}  // namespace

std::string load_text(const fs::path& place) {
  std::string text = fs::is_directory(place) ? prose_of_folder(place) : read(place);
  std::erase_if(text, [](unsigned char c) { return c >= 127 || (c < 32 && c != '\n'); });
  return text.size() < kEnough ? text + made_up_sentences() : text;
}

Alphabet::Alphabet(std::string_view text) {
  const std::set<char> characters(text.begin(), text.end());
  characters_.assign(characters.begin(), characters.end());
  for (std::size_t i = 0; i < characters_.size(); ++i) {
    ids_.at(static_cast<unsigned char>(characters_[i])) = static_cast<std::int64_t>(i);
  }
}

std::vector<std::int64_t> Alphabet::encode(std::string_view text) const {
  std::vector<std::int64_t> ids(text.size());
  std::transform(text.begin(), text.end(), ids.begin(),
                 [this](char c) { return ids_.at(static_cast<unsigned char>(c)); });
  return ids;
}

}  // namespace char_gpt
