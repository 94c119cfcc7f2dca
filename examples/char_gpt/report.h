// What rank 0 tells about a run: a line of progress every two seconds, then the figures and the curve.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace char_gpt {

struct RunFacts {
  int ranks = 1;
  int threads = 1;                   // of each rank
  std::int64_t batch = 0;            // windows per rank and step
  std::int64_t tokens_per_step = 0;  // over all ranks
  double uniform_loss = 0;           // of guessing every character alike
};

class Report {
 public:
  Report(RunFacts facts, bool quiet);

  // After each step. `done` is the share of the run that is over; `exposed_seconds` the time spent waiting
  // for communication since the start.
  void step(double loss, double done, double exposed_seconds);

  // The curve and the figures, on standard output.
  void print_summary() const;
  // loss.svg and sample.txt in `folder`, which is created. This and the next throw when they cannot write.
  void write_pictures(const std::string& folder, const std::string& sample) const;
  void write_json(const std::string& file) const;

 private:
  using Clock = std::chrono::steady_clock;
  double seconds_since_start() const;
  // From the median step, which a busy moment of the machine does not move.
  double tokens_per_second() const;
  double final_loss() const;

  const RunFacts facts_;
  const bool quiet_;
  const Clock::time_point start_ = Clock::now();
  std::vector<double> losses_;
  std::vector<double> step_seconds_;
  double last_step_end_ = 0;
  double exposed_seconds_ = 0;
  // At the last line of progress.
  double said_at_ = 0;
  std::size_t said_steps_ = 0;
  double said_exposed_ = 0;
};

}  // namespace char_gpt
