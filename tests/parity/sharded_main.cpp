// Runs the cases on DTensors with processes of lockstep and holds what they saw against what torch saw:
//   sharded_parity <folder with torch's results> <folder for ours>
// Prints a table; exits with 1 when a case is too far away or lies elsewhere, or when a broken case does not.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <set>
#include <string>

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

Sighting read(const std::string& base) {
  return {read_record(base + ".txt"), read_placements(base + ".placements.txt")};
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

// `our_world` ran cases of `world`.
ShardedComparison compare_case(const ShardedWorld& world, const std::string& our_world,
                               const std::string& name, const char* type, const std::filesystem::path& theirs,
                               const std::filesystem::path& ours) {
  ShardedComparison all;
  for (int rank = 0; rank < world.n_ranks(); ++rank) {
    all.add(compare(part_of(read(base_of(ours, our_world, type, rank)), name),
                    part_of(read(base_of(theirs, world.name, type, rank)), name), Theirs::kComplete));
  }
  return all;
}

void print_row(const ShardedWorld& world, const std::string& name, const char* type,
               const ShardedComparison& result, const char* verdict) {
  std::printf("%-30s %-7s %-4s %8zu %10zu %6zu  %-10.3g %-10s %s\n", name.c_str(), world.name.c_str(), type,
              result.values.n_tensors, result.n_placements, result.n_listed, result.values.worst, verdict,
              result.values.worst == 0 ? "" : result.values.worst_name.c_str());
}

bool print_cases(const std::filesystem::path& theirs, const std::filesystem::path& ours) {
  bool good = true;
  for (const auto& world : sharded_worlds()) {
    for (const auto& one : world.cases) {
      for (const auto& [type, dtype] : kTypes) {
        const auto result = compare_case(world, world.name, one.name, type, theirs, ours);
        good = good && result.within();
        print_row(world, one.name, type, result, result.within() ? "same" : "DIFFERENT");
        for (const auto& text : result.misplaced) std::printf("    %s\n", text.c_str());
      }
    }
  }
  const auto& line = sharded_worlds().front();
  for (const auto& one : broken_cases()) {
    const auto result = compare_case(line, kBrokenWorld, one.name, "f32", theirs, ours);
    good = good && !result.within();
    print_row(line, one.name + ", broken", "f32", result, result.within() ? "UNNOTICED" : "noticed");
  }
  return good;
}

void print_differences(const std::filesystem::path& theirs) {
  std::printf("\nPlaced differently on purpose, of %zu tensors:\n", differences().size());
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
  const bool good = print_cases(theirs, ours);
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
