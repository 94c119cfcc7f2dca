// Runs the cases on DTensors with processes of lockstep and holds what they saw against what torch saw:
//   sharded_parity <folder with torch's results> <folder for ours>
// Prints a table; exits with 1 when a case is too far away or lies elsewhere, or when a broken case does not.
#include <ATen/Parallel.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/collective/collective.h"
#include "lockstep/process/spawn.h"
#include "tests/parity/sharded_cases.h"

namespace parity {
namespace {

struct Type {
  const char* name;
  at::ScalarType dtype;
};
constexpr Type kTypes[] = {{"f32", at::kFloat}, {"f64", at::kDouble}};

constexpr const char* kBrokenWorld = "broken";

std::string base_of(const std::filesystem::path& folder, const std::string& world, const char* type,
                    int rank) {
  return (folder / (world + "." + type + ".rank" + std::to_string(rank))).string();
}

// By rank.
std::vector<Sighting> read_all(const std::filesystem::path& folder, const std::string& name, const char* type,
                               int n_ranks) {
  std::vector<Sighting> all;
  for (int rank = 0; rank < n_ranks; ++rank) {
    const auto base = base_of(folder, name, type, rank);
    all.push_back({read_record(base + ".txt"), read_placements(base + ".placements.txt")});
  }
  return all;
}

void run_world(const ShardedWorld& world, int rank, const std::filesystem::path& theirs,
               const std::filesystem::path& ours) {
  at::set_num_threads(1);
  lockstep::init_process_group();
  const bool first = &world == &sharded_worlds().front();
  for (const auto& [type, dtype] : kTypes) {
    const auto placements = read_placements(base_of(theirs, world.name, type, rank) + ".placements.txt");
    write_sighting(base_of(ours, world.name, type, rank),
                   run_sharded(world, world.cases, rank, dtype, placements));
    if (!first) continue;
    write_sighting(base_of(ours, kBrokenWorld, type, rank),
                   run_sharded(world, broken_cases(), rank, dtype, placements));
  }
  lockstep::destroy_process_group();
}

ShardedComparison compare_case(const std::vector<Sighting>& ours, const std::vector<Sighting>& theirs,
                               const std::string& name) {
  ShardedComparison all;
  for (std::size_t rank = 0; rank < theirs.size(); ++rank)
    all.add(compare(part_of(ours[rank], name), part_of(theirs[rank], name), Theirs::kComplete));
  return all;
}

void print_row(const ShardedWorld& world, const std::string& name, const char* type,
               const ShardedComparison& result, const char* verdict) {
  std::printf("%-30s %-7s %-4s %8zu %10zu %6zu  %-10.3g %-10s %s\n", name.c_str(), world.name.c_str(), type,
              result.values.n_tensors, result.n_placements, result.n_listed, result.values.worst, verdict,
              result.values.worst == 0 ? "" : result.values.worst_name.c_str());
}

bool print_cases(const ShardedWorld& world, const Type& type, const std::filesystem::path& theirs_at,
                 const std::filesystem::path& ours_at) {
  const auto theirs = read_all(theirs_at, world.name, type.name, world.n_ranks());
  const auto ours = read_all(ours_at, world.name, type.name, world.n_ranks());
  bool good = true;
  for (const auto& one : world.cases) {
    if (type.dtype == at::kFloat && !one.in_f32) continue;
    const auto result = compare_case(ours, theirs, one.name);
    good = good && result.within();
    print_row(world, one.name, type.name, result, result.within() ? "same" : "DIFFERENT");
    for (const auto& text : result.misplaced) std::printf("    %s\n", text.c_str());
  }
  return good;
}

bool print_broken(const std::filesystem::path& theirs_at, const std::filesystem::path& ours_at) {
  const auto& line = sharded_worlds().front();
  const auto theirs = read_all(theirs_at, line.name, "f32", line.n_ranks());
  const auto ours = read_all(ours_at, kBrokenWorld, "f32", line.n_ranks());
  bool good = true;
  for (const auto& one : broken_cases()) {
    const auto result = compare_case(ours, theirs, one.name);
    good = good && !result.within();
    print_row(line, one.name + ", broken", "f32", result, result.within() ? "UNNOTICED" : "noticed");
  }
  return good;
}

void print_differences(const std::filesystem::path& theirs) {
  std::printf("\nPlaced differently on purpose, %zu tensors:\n", differences().size());
  for (const auto& world : sharded_worlds()) {
    for (const auto& [tensor, text] :
         read_placements(base_of(theirs, world.name, "f64", 0) + ".placements.txt")) {
      if (const auto* listed = difference_of(tensor))
        std::printf("  %s: torch %s, lockstep %s\n      %s\n", tensor.c_str(), text.c_str(),
                    listed->ours.c_str(), listed->why.c_str());
    }
  }
}

bool print_table(const std::filesystem::path& theirs, const std::filesystem::path& ours) {
  std::printf("\n%-30s %-7s %-4s %8s %10s %6s  %-10s %-10s %s\n", "case", "mesh", "type", "tensors",
              "placements", "listed", "worst", "verdict", "where it is worst");
  bool good = true;
  for (const auto& world : sharded_worlds()) {
    for (const auto& type : kTypes) good = print_cases(world, type, theirs, ours) && good;
  }
  good = print_broken(theirs, ours) && good;
  print_differences(theirs);
  std::printf("\nworst: the largest max|a-b| / max|b| of a tensor, local or full; at most %g is the same.\n",
              kTolerance);
  return good;
}

}  // namespace
}  // namespace parity

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: sharded_parity <folder with torch's results> <folder for ours>\n");
    return 2;
  }
  try {
    const std::filesystem::path theirs = argv[1], ours = argv[2];
    std::filesystem::create_directories(ours);
    for (const auto& world : parity::sharded_worlds())
      lockstep::spawn(world.n_ranks(), [&](int rank) { parity::run_world(world, rank, theirs, ours); });
    return parity::print_table(theirs, ours) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sharded_parity: %s\n", error.what());
    return 1;
  }
}
