// The command line of the example.
#pragma once

#include <cstdint>
#include <string>

namespace char_gpt {

struct Options {
  double seconds = 60;     // training ends at this time, or
  std::int64_t steps = 0;  // after this many steps when not 0
  std::int64_t batch = 8;  // windows per rank and step
  double rate = 5e-3;      // of learning, at its peak
  std::string text;        // a file, or a folder with documents
  std::string out;         // folder for the pictures; empty: none
  std::string json;        // file for the figures; empty: none
  bool quiet = false;      // figures only: no progress, no sample
};

// Prints the help or what is wrong and ends the program when there is nothing to train.
Options parse_options(int argc, char** argv);

}  // namespace char_gpt
