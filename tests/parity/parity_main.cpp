// Trains every case with two processes of lockstep and holds what they saw against what python torch saw:
//   parity <folder with torch's results> <folder for ours>
// Prints a table; exits with 1 when a case is too far away, or when the broken divisor is not.
#include <ATen/Parallel.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/collective/collective.h"
#include "lockstep/process/spawn.h"
#include "tests/parity/cases.h"
#include "tests/parity/record.h"

namespace parity {
namespace {

using Types = std::vector<std::pair<std::string, at::ScalarType>>;
Types types_of(const Case& one) {
  return one.in_f32 ? Types{{"f32", at::kFloat}, {"f64", at::kDouble}} : Types{{"f64", at::kDouble}};
}

constexpr const char* kBroken = "broken_divisor";

std::filesystem::path file_of(const std::filesystem::path& folder, const std::string& name,
                              const std::string& type, int rank) {
  return folder / (name + "." + type + ".rank" + std::to_string(rank) + ".txt");
}

void train_all(int rank, const std::filesystem::path& folder) {
  at::set_num_threads(1);
  lockstep::init_process_group();
  std::vector<Case> all = cases();
  all.push_back({.name = kBroken, .train = train_with_broken_divisor});
  for (const Case& one : all) {
    for (const auto& [type, dtype] : types_of(one))
      write_record(file_of(folder, one.name, type, rank), one.train(rank, dtype));
    lockstep::barrier();
    if (rank == 0) std::printf("parity: lockstep %s\n", one.name.c_str());
    std::fflush(stdout);
  }
  lockstep::destroy_process_group();
}

Comparison compare_files(const std::filesystem::path& ours, const std::string& our_name,
                         const std::filesystem::path& theirs, const std::string& their_name,
                         const std::string& type) {
  Comparison all;
  for (int rank = 0; rank < kRanks; ++rank) {
    all.add(compare(read_record(file_of(ours, our_name, type, rank)),
                    read_record(file_of(theirs, their_name, type, rank)), Theirs::kComplete));
  }
  return all;
}

void print_row(const std::string& name, const std::string& type, const Comparison& result,
               const char* verdict) {
  std::printf("%-16s %-4s %8zu  %-10.3g %-10s %s\n", name.c_str(), type.c_str(), result.n_tensors,
              result.worst, verdict, result.worst == 0 ? "" : result.worst_name.c_str());
}

bool print_table(const std::filesystem::path& theirs, const std::filesystem::path& ours) {
  bool good = true;
  std::printf("\n%-16s %-4s %8s  %-10s %-10s %s\n", "case", "type", "tensors", "worst", "verdict",
              "where it is worst");
  for (const Case& one : cases()) {
    for (const auto& [type, dtype] : types_of(one)) {
      const Comparison result = compare_files(ours, one.name, theirs, one.name, type);
      good = good && result.within();
      print_row(one.name, type, result, result.within() ? "same" : "DIFFERENT");
    }
  }
  const Comparison broken = compare_files(ours, kBroken, theirs, "plain", "f32");
  good = good && !broken.within();
  print_row(kBroken, "f32", broken, broken.within() ? "UNNOTICED" : "noticed");
  std::printf("\nworst: the largest max|a-b| / max|b| of a tensor; at most %g is the same.\n", kTolerance);
  return good;
}

}  // namespace
}  // namespace parity

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: parity <folder with torch's results> <folder for ours>\n");
    return 2;
  }
  try {
    const std::filesystem::path theirs = argv[1], ours = argv[2];
    std::filesystem::create_directories(ours);
    lockstep::spawn(parity::kRanks, [&](int rank) { parity::train_all(rank, ours); });
    return parity::print_table(theirs, ours) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "parity: %s\n", error.what());
    return 1;
  }
}
