#include "examples/char_gpt/options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

namespace char_gpt {

Options parse_options(int argc, char** argv) {
  Options options;
  options.text = CHAR_GPT_TEXT;
  CLI::App app("Trains a small GPT on the characters of a text, on as many ranks as it is started with.",
               "char_gpt");
  auto* seconds = app.add_option("--seconds", options.seconds, "train this long")->capture_default_str();
  app.add_option("--steps", options.steps, "train this many steps instead")->excludes(seconds);
  app.add_option("--batch", options.batch, "windows of text per rank and step")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--rate", options.rate, "peak learning rate")->capture_default_str();
  app.add_option("--text", options.text, "a text file, or a folder whose documents to learn")
      ->check(CLI::ExistingPath);
  app.add_option("--out", options.out, "folder for loss.svg and sample.txt");
  app.add_option("--json", options.json, "file for the figures of the run");
  app.add_flag("--quiet", options.quiet, "no progress and no sample");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e));
  }
  return options;
}

}  // namespace char_gpt
