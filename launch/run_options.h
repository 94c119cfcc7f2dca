// Options of `lockstep run`. Thread safety: values, no shared state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::launch {

struct RunOptions {
  std::string processes = "1";  // -n: a number, auto, cpu or gpu
  std::string nodes = "1";      // a number or MIN:MAX
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = -1;  // -1: any free port on one host, 29500 on several
  std::string role = "default";
  double grace_s = 30;
  bool prefix = true;
  std::vector<std::string> command;
};

// The options, parsed and validated.
struct RunPlan {
  int n_workers = 1;  // on this host
  int n_nodes = 1;
  int node_rank = 0;
  std::string master_addr;
  std::uint16_t master_port = 0;
  Milliseconds grace{30'000};

  int world_size() const { return n_workers * n_nodes; }
  int first_rank() const { return n_workers * node_rank; }
};

// Raises kUsage with the option's name and text.
RunPlan make_plan(const RunOptions& options);

// A number, auto or cpu (one per core), gpu (one per NVIDIA device in the directory `devices` that
// CUDA_VISIBLE_DEVICES does not hide). auto does not count GPUs yet, since no engine for them can be
// selected.
int parse_processes(const std::string& text, const std::string& devices = "/dev");
// N or N:N; raises kUnsupported for a range, kUsage for malformed text.
int parse_nodes(const std::string& text);

}  // namespace lockstep::launch
