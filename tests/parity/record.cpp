#include "tests/parity/record.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace parity {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, scale = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return kInfinite;
    difference = std::max(difference, std::abs(a[i] - b[i]));
    scale = std::max(scale, std::abs(b[i]));
  }
  if (difference == 0) return 0;
  return scale == 0 ? kInfinite : difference / scale;
}

Comparison compare_one(const std::string& name, const Values& a, const Values& b) {
  if (a.has_value() != b.has_value())
    return {1, kInfinite, name + (b ? " (only theirs has values)" : " (only ours has values)")};
  if (!a) return {1, 0, name};
  if (a->size() != b->size()) return {1, kInfinite, name + " (other sizes)"};
  return {1, distance(*a, *b), name};
}

double number(const std::string& word, const std::string& where) {
  double value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size())
    throw std::runtime_error(where + ": " + word + " is no number");
  return value;
}

}  // namespace

void Comparison::add(const Comparison& other) {
  n_tensors += other.n_tensors;
  if (other.worst <= worst && !worst_name.empty()) return;
  worst = other.worst;
  worst_name = other.worst_name;
}

Comparison compare(const Record& ours, const Record& theirs, Theirs complete) {
  Comparison all;
  for (const auto& [name, values] : theirs) {
    const auto found = ours.find(name);
    all.add(found == ours.end() ? Comparison{1, kInfinite, name + " (ours has none)"}
                                : compare_one(name, found->second, values));
  }
  if (complete == Theirs::kSome) return all;
  for (const auto& [name, values] : ours) {
    if (!theirs.contains(name)) all.add({1, kInfinite, name + " (theirs has none)"});
  }
  return all;
}

void write_record(const std::filesystem::path& path, const Record& record) {
  std::ofstream file(path);
  file.precision(17);
  for (const auto& [name, values] : record) {
    file << name;
    if (!values) file << " none";
    for (const double value : values.value_or(std::vector<double>{})) file << ' ' << value;
    file << '\n';
  }
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

Record read_record(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  Record record;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    std::string name;
    words >> name;
    const std::vector<std::string> rest{std::istream_iterator<std::string>(words), {}};
    Values& values = record[name];
    if (rest == std::vector<std::string>{"none"}) continue;
    values.emplace();
    for (const std::string& word : rest) values->push_back(number(word, path.string() + ", " + name));
  }
  return record;
}

}  // namespace parity
