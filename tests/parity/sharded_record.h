// What a rank saw of DTensors: values by name, as in record.h, and placements by name. Every tensor has two
// entries of values, <name>.local and <name>.full, or the second alone where it is plain.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/dtensor/placement.h"
#include "tests/parity/record.h"

namespace parity {

// By the name of the tensor: "Shard(0) Replicate()", a placement per mesh dimension; "plain" for a tensor
// that is no DTensor.
using PlacementTexts = std::map<std::string, std::string>;

struct Sighting {
  Record values;
  PlacementTexts placements;
};

// <base>.txt and <base>.placements.txt. Both raise std::runtime_error naming the file.
void write_sighting(const std::string& base, const Sighting& seen);
PlacementTexts read_placements(const std::filesystem::path& path);
// What belongs to one case: names that begin with "<name>.".
Sighting part_of(const Sighting& seen, const std::string& name);

std::string text_of(const lockstep::Placements& placements);
// None where a tensor cannot be redistributed to it: a partial, a kind that only torch has, "plain".
std::optional<lockstep::Placements> reachable(const std::string& text);

// A tensor that lockstep places differently from torch on purpose. Its full values are compared like all
// others. The list is in sharded_record.cpp.
struct Difference {
  // How its local values are compared.
  enum class Kind {
    kSameLayout,   // as they are: the layouts have two names
    kOtherLayout,  // after redistribution to torch's layout; not at all where that cannot be reached
    kOtherParts,   // not at all: both are partial and add up to the same
  };
  std::string tensor;
  std::string ours;
  Kind kind;
  std::string why;
};
const std::vector<Difference>& differences();
// Null where the placements must be torch's.
const Difference* difference_of(const std::string& tensor);

struct ShardedComparison {
  Comparison values;
  std::vector<std::string> misplaced;  // a sentence each
  std::size_t n_placements = 0;
  std::size_t n_listed = 0;  // of these, those that `differences` lists
  bool within() const { return values.within() && misplaced.empty() && n_placements != 0; }
  void add(const ShardedComparison& other);
};
// Both must have seen the same tensors; `complete` is about the values, as in record.h.
ShardedComparison compare(const Sighting& ours, const Sighting& theirs, Theirs complete);

}  // namespace parity
