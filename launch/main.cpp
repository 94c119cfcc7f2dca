// The `lockstep` command.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>

#include "launch/env_command.h"
#include "launch/run.h"
#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

// As shells, and torchrun, end after wrong arguments.
constexpr int kUsageExit = 2;

// Both spellings of torchrun's flags: --nproc-per-node and --nproc_per_node.
std::string both(const std::string& name) {
  std::string underscored = name;
  for (char& c : underscored) c = c == '-' ? '_' : c;
  return underscored == name ? "--" + name : "--" + name + ",--" + underscored;
}

void preset(std::string& value, base::EnvVar var) {
  if (const auto text = base::environment(var)) value = *text;
}

void preset(int& value, base::EnvVar var) {
  if (const auto number = base::environment_int(var)) value = static_cast<int>(*number);
}

// Before the command line is parsed, so that a flag wins over its preset.
void read_presets(RunOptions& options) {
  preset(options.processes, base::EnvVar::kPetNprocPerNode);
  preset(options.nodes, base::EnvVar::kPetNnodes);
  preset(options.node_rank, base::EnvVar::kPetNodeRank);
  preset(options.master_addr, base::EnvVar::kPetMasterAddr);
  preset(options.master_port, base::EnvVar::kPetMasterPort);
  preset(options.role, base::EnvVar::kPetRole);
}

CLI::App* add_run(CLI::App& app, RunOptions& options) {
  CLI::App* run =
      app.add_subcommand("run", "Run a program as N workers: lockstep run -n 4 -- program arguments");
  // Parsing ends at the first word that is no option of ours: the program, whose own options must not be
  // taken for ours.
  run->prefix_command();
  run->footer(
      "Options may be preset as PET_NPROC_PER_NODE, PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, "
      "PET_MASTER_PORT and "
      "PET_ROLE.\nWorker 0 has the launcher's standard input; the others have none.");
  run->add_option("-n," + both("nproc-per-node"), options.processes,
                  "workers on this host: a number, auto or cpu (one per core), or gpu (one per GPU)")
      ->capture_default_str();
  run->add_option(both("nnodes"), options.nodes, "hosts")->capture_default_str();
  run->add_option(both("node-rank"), options.node_rank, "this host's number, from 0")->capture_default_str();
  run->add_option(both("master-addr"), options.master_addr, "address of host 0")->capture_default_str();
  run->add_option(both("master-port"), options.master_port,
                  "port of the store on host 0; default: a free one on one host, 29500 on several");
  run->add_option(both("role"), options.role, "name of the workers' role")->capture_default_str();
  run->add_option(both("grace"), options.grace_s, "seconds from SIGTERM to SIGKILL")->capture_default_str();
  run->add_flag_callback(
      both("no-prefix"), [&options] { options.prefix = false; }, "lines without rank, none collapsed");
  return run;
}

// CLI11 would only say that a subcommand is required.
void check_command(const CLI::App& app, int argc, char** argv) {
  const std::string_view word = argc > 1 ? argv[1] : "";
  if (word == "--help" || word == "-h" || word == "--version") return;
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (std::ranges::any_of(commands, [&](const auto* command) { return command->get_name() == word; })) return;
  base::raise(ErrorKind::kUsage,
              base::cat(word.empty() ? "no command" : base::cat("there is no command \"", word, "\""),
                        "; a program is started with: lockstep run -n 4 -- program arguments"
                        "\nlockstep --help lists the commands"));
}

int main_or_raise(int argc, char** argv) {
  RunOptions options;
  read_presets(options);
  CLI::App app{"lockstep: distributed training for C++ on libtorch", "lockstep"};
  app.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION);
  app.require_subcommand(1);
  CLI::App* const run_command = add_run(app, options);
  CLI::App* const env_command = app.add_subcommand("env", "Show what lockstep finds in this environment");
  // After the subcommands were added, which it compares the word with.
  check_command(app, argc, argv);
  // CLI11 sees only what is before the first "--": what follows belongs to the program, word by word.
  const auto dashes = std::find(argv + 1, argv + argc, std::string_view("--"));
  try {
    app.parse(static_cast<int>(dashes - argv), argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageExit;
  }
  if (env_command->parsed()) {
    std::fputs(environment_report().c_str(), stdout);
    return 0;
  }
  options.command = run_command->remaining();
  // With prefix_command() a misspelled option counts as the first word of the program.
  if (!options.command.empty() && options.command.front().starts_with("-")) {
    base::raise(ErrorKind::kUsage,
                "lockstep run has no option " + options.command.front() + "; see lockstep run --help");
  }
  // The first "--" is ours only when no program stands before it.
  options.command.insert(options.command.end(), dashes + (dashes != argv + argc && options.command.empty()),
                         argv + argc);
  return run(options);
}

}  // namespace
}  // namespace lockstep::launch

int main(int argc, char** argv) {
  try {
    return lockstep::launch::main_or_raise(argc, argv);
  } catch (const lockstep::Error& error) {
    std::fprintf(stderr, "lockstep: %s\n", error.what());
    return error.kind() == lockstep::ErrorKind::kUsage ? lockstep::launch::kUsageExit : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lockstep: %s\n", error.what());
    return 1;
  }
}
