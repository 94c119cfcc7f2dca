#include "tests/parity/sharded_record.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace parity {
namespace {

bool belongs_to(const std::string& name, const std::string& owner) {
  return name.starts_with(owner + ".");
}

// What is wrong with the placements; empty when nothing is.
std::string misplacement(const std::string& tensor, const std::string& ours, const std::string& theirs) {
  const auto* listed = difference_of(tensor);
  const auto& expected = listed ? listed->ours : theirs;
  if (ours == expected) return {};
  return tensor + " is " + ours + ", torch's is " + theirs + (listed ? ", the list says " + expected : "");
}

}  // namespace

void write_sighting(const std::string& base, const Sighting& seen) {
  write_record(base + ".txt", seen.values);
  std::ofstream file(base + ".placements.txt");
  for (const auto& [tensor, text] : seen.placements) file << tensor << ' ' << text << '\n';
  if (!file.flush()) throw std::runtime_error("cannot write " + base + ".placements.txt");
}

PlacementTexts read_placements(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  PlacementTexts texts;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    const auto space = line.find(' ');
    if (space == std::string::npos) throw std::runtime_error(path.string() + ": no placements in: " + line);
    texts[line.substr(0, space)] = line.substr(space + 1);
  }
  return texts;
}

Sighting part_of(const Sighting& seen, const std::string& name) {
  Sighting part;
  for (const auto& [tensor, values] : seen.values) {
    if (belongs_to(tensor, name)) part.values[tensor] = values;
  }
  for (const auto& [tensor, text] : seen.placements) {
    if (belongs_to(tensor, name)) part.placements[tensor] = text;
  }
  return part;
}

std::string text_of(const lockstep::Placements& placements) {
  std::string text;
  for (const auto& placement : placements) text += (text.empty() ? "" : " ") + to_string(placement);
  return text;
}

std::optional<lockstep::Placements> reachable(const std::string& text) {
  lockstep::Placements placements;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (word == "Replicate()") {
      placements.push_back(lockstep::Replicate());
    } else if (word.starts_with("Shard(") && word.ends_with(")")) {
      placements.push_back(lockstep::Shard(std::stoi(word.substr(6))));
    } else {
      return std::nullopt;
    }
  }
  return placements;
}

namespace {

std::vector<Difference> listed_differences() {
  using Kind = Difference::Kind;
  std::vector<Difference> all = {
      {"add_partial_replicate.out", "Partial(sum)", Kind::kOtherParts,
       "one rank adds the replica, which is exact; torch adds a share of it on every rank"},
      {"softmax_over_shards.out", "Shard(1)", Kind::kOtherLayout,
       "a maximum and a sum per row are exchanged; torch gathers the rows"},
      {"softmax_over_shards.grad.x", "Shard(1)", Kind::kOtherLayout, "as its result"},
      {"embedding_rows.out", "Partial(sum)", Kind::kSameLayout,
       "rows of other ranks are zero at once; torch zeroes them when it reduces"},
      {"embedding_rows.grad.table", "Shard(0)", Kind::kOtherLayout,
       "each rank computes the gradient of its rows; torch computes that of the table on every rank"},
      {"cross_entropy_of_rows.out", "Replicate()", Kind::kOtherLayout,
       "the loss is reduced at once, as a mean must be, which is divided by the weight of all rows"},
      {"mean_over_shards.out", "Partial(sum)", Kind::kOtherLayout,
       "ranks divide by the number of all rows, which holds for uneven shards as well"},
      {"mean_uneven.out", "Partial(sum)", Kind::kOtherLayout,
       "the same as for even shards; torch gathers the rows"},
      {"norm_over_shards.out", "Replicate()", Kind::kOtherLayout,
       "the sum is reduced at once and the root taken; torch has a placement for it"},
      {"view_merges_inner.out", "Shard(0, interleave 2)", Kind::kSameLayout, "lockstep's name for it"},
      {"cat_over_shards.out", "Shard(1)", Kind::kOtherLayout,
       "an all_to_all to a dimension that is not joined; torch gathers both tensors"},
  };
  // Gradients arrive in their parameter's placements, so that an optimizer sends nothing.
  const auto as_parameter = [&](const std::string& model, const std::string& name, const char* placement) {
    for (const char* step : {"step0", "step1"}) {
      all.push_back({model + "." + step + ".grad." + name, placement, Kind::kOtherLayout,
                     "gradients arrive in their parameter's placements"});
    }
  };
  const std::string sequence = "transformer_sequence_parallel";
  for (const auto& model : {std::string("transformer_tensor_parallel"), sequence})
    as_parameter(model, "words.weight", "Shard(0)");
  for (const char* norm : {"layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "norm"}) {
    for (const char* parameter : {".weight", ".bias"})
      as_parameter(sequence, std::string(norm) + parameter, "Replicate()");
  }
  return all;
}

}  // namespace

const std::vector<Difference>& differences() {
  static const std::vector<Difference> all = listed_differences();
  return all;
}

const Difference* difference_of(const std::string& tensor) {
  const auto& all = differences();
  const auto found = std::ranges::find(all, tensor, &Difference::tensor);
  return found == all.end() ? nullptr : &*found;
}

void ShardedComparison::add(const ShardedComparison& other) {
  values.add(other.values);
  misplaced.insert(misplaced.end(), other.misplaced.begin(), other.misplaced.end());
  n_placements += other.n_placements;
  n_listed += other.n_listed;
}

ShardedComparison compare(const Sighting& ours, const Sighting& theirs, Theirs complete) {
  ShardedComparison result;
  for (const auto& [tensor, text] : ours.placements) {
    if (!theirs.placements.contains(tensor)) result.misplaced.push_back(tensor + " is not torch's");
  }
  auto values = theirs.values;
  for (const auto& [tensor, text] : theirs.placements) {
    const auto found = ours.placements.find(tensor);
    const auto wrong =
        found == ours.placements.end() ? tensor + " is missing" : misplacement(tensor, found->second, text);
    if (!wrong.empty()) result.misplaced.push_back(wrong);
    ++result.n_placements;
    const auto* listed = difference_of(tensor);
    if (!listed) continue;
    ++result.n_listed;
    if (listed->kind != Difference::Kind::kSameLayout && !reachable(text)) values.erase(tensor + ".local");
  }
  result.values = compare(ours.values, values, complete);
  return result;
}

}  // namespace parity
