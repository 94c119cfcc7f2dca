// What a rank saw while it trained: tensors by name, as numbers. Written by cases.cpp and by parity.py in one
// format, a tensor a line: its name and its values, or `none` for a gradient that is not there. Lines that
// begin with # say where the numbers come from.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace parity {

using Values = std::optional<std::vector<double>>;
using Record = std::map<std::string, Values>;

// Both raise std::runtime_error naming the file; read also for a line it does not understand.
void write_record(const std::filesystem::path& path, const Record& record);
Record read_record(const std::filesystem::path& path);

// The bound for every tensor: max|a - b| / max|b|.
constexpr double kTolerance = 1e-6;

struct Comparison {
  std::size_t n_tensors = 0;
  double worst = 0;        // infinite when something cannot be compared
  std::string worst_name;  // and why
  bool within() const { return n_tensors != 0 && worst <= kTolerance; }
  // Both together.
  void add(const Comparison& other);
};

// Whether `theirs` may leave tensors out, as goldens do. What it has, `ours` must have, too: a tensor that is
// missing, is none on one side only, has another number of values or one that is not finite is infinitely far
// away.
enum class Theirs { kComplete, kSome };
Comparison compare(const Record& ours, const Record& theirs, Theirs complete);

}  // namespace parity
