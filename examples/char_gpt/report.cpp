#include "examples/char_gpt/report.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>

#include "examples/char_gpt/chart.h"

namespace char_gpt {
namespace {

constexpr double kSecondsBetweenLines = 2;

double mean_of_last(const std::vector<double>& values, std::size_t n) {
  n = std::clamp<std::size_t>(n, 1, values.size());
  return std::accumulate(values.end() - static_cast<std::ptrdiff_t>(n), values.end(), 0.0) /
         static_cast<double>(n);
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  if (!(file << content << std::flush)) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace

Report::Report(RunFacts facts, bool quiet) : facts_(facts), quiet_(quiet) {}

double Report::seconds_since_start() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

void Report::step(double loss, double done, double exposed_seconds) {
  const double now = seconds_since_start();
  losses_.push_back(loss);
  step_seconds_.push_back(now - last_step_end_);
  last_step_end_ = now;
  exposed_seconds_ = exposed_seconds;
  if (quiet_ || (now - said_at_ < kSecondsBetweenLines && losses_.size() > 1 && done < 1)) return;
  const std::size_t n_steps = losses_.size() - said_steps_;
  const double passed = std::max(now - said_at_, 1e-9);
  std::printf("%3.0f%%  step %5zu  loss %6.3f  %8.0f tokens/s  exposed communication %4.1f%%\n",
              100 * std::min(done, 1.0), losses_.size(), mean_of_last(losses_, n_steps),
              static_cast<double>(n_steps) * static_cast<double>(facts_.tokens_per_step) / passed,
              100 * (exposed_seconds - said_exposed_) / passed);
  std::fflush(stdout);
  said_at_ = now;
  said_steps_ = losses_.size();
  said_exposed_ = exposed_seconds;
}

double Report::tokens_per_second() const {
  // The first steps pay for memory and for the second layout of the buckets.
  const std::size_t n_warm = std::min<std::size_t>(5, step_seconds_.size() / 2);
  std::vector<double> times(step_seconds_.begin() + static_cast<std::ptrdiff_t>(n_warm), step_seconds_.end());
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return static_cast<double>(facts_.tokens_per_step) / *middle;
}

double Report::final_loss() const {
  return mean_of_last(losses_, losses_.size() / 20);
}

void Report::print_summary() const {
  std::printf("\nloss\n%s", text_plot(losses_).c_str());
  std::printf(
      "\nloss %.2f -> %.2f in %zu steps, %.0f s; %.0f tokens/s on %d rank%s with %d thread%s each; "
      "%.1f%% of the time waiting for communication\n",
      losses_.front(), final_loss(), losses_.size(), last_step_end_, tokens_per_second(), facts_.ranks,
      facts_.ranks == 1 ? "" : "s", facts_.threads, facts_.threads == 1 ? "" : "s",
      100 * exposed_seconds_ / last_step_end_);
}

void Report::write_pictures(const std::string& folder, const std::string& sample) const {
  const std::filesystem::path place(folder);
  std::filesystem::create_directories(place);
  const std::string ranks = std::to_string(facts_.ranks) + (facts_.ranks == 1 ? " rank" : " ranks");
  write_file(place / "loss.svg", svg({.title = "char_gpt on " + ranks,
                                      .x_label = "step",
                                      .y_label = "loss, nats per character",
                                      .values = losses_,
                                      .result = final_loss(),
                                      .reference = facts_.uniform_loss,
                                      .reference_label = "guessing every character alike"}));
  write_file(place / "sample.txt", sample + "\n");
}

void Report::write_json(const std::string& file) const {
  const nlohmann::json figures{{"ranks", facts_.ranks},
                               {"threads", facts_.threads},
                               {"batch", facts_.batch},
                               {"steps", losses_.size()},
                               {"seconds", last_step_end_},
                               {"tokens_per_second", tokens_per_second()},
                               {"exposed_share", exposed_seconds_ / last_step_end_},
                               {"first_loss", losses_.front()},
                               {"final_loss", final_loss()}};
  write_file(file, figures.dump(2) + "\n");
}

}  // namespace char_gpt
