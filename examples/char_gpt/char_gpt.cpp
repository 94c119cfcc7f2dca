// Trains a small GPT on the characters of this project's own documents, on as many ranks as it is started
// with:
//
//   char_gpt                             one rank
//   lockstep run -n auto -- char_gpt     one rank for each core
//
// It is an ordinary libtorch program but for the places marked (1) to (6). The model is in model.h; reading
// the text and reporting, which are not the point, are in the files beside.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <numbers>
#include <string>

#include "examples/char_gpt/model.h"
#include "examples/char_gpt/options.h"
#include "examples/char_gpt/report.h"
#include "examples/char_gpt/text.h"

namespace char_gpt {
namespace {

// A short rise, then half a cosine down to a tenth. `done` runs from 0 to 1.
double learning_rate(double peak, double done) {
  const double rise = std::min(1.0, done / 0.05 + 0.05);
  const double fall = 0.55 + 0.45 * std::cos(std::numbers::pi * std::min(done, 1.0));
  return peak * rise * fall;
}

// How much of the run is over, by steps or by the clock of this rank.
class Budget {
 public:
  explicit Budget(const Options& options) : options_(options) {}
  double done(std::int64_t steps) const {
    if (options_.steps > 0) return static_cast<double>(steps) / static_cast<double>(options_.steps);
    return std::chrono::duration<double>(Clock::now() - start_).count() / options_.seconds;
  }

 private:
  using Clock = std::chrono::steady_clock;
  const Options options_;
  const Clock::time_point start_ = Clock::now();
};

void train(lockstep::DistributedDataParallel<GptImpl>& model, const at::Tensor& ids, const Options& options,
           Report& report) {
  auto windows = Windows(ids, model->module()->options().context);
  // (3) Each rank draws its own part of every epoch.
  lockstep::DistributedSampler sampler(windows.size().value(), {.seed = 1});
  auto loader = torch::data::make_data_loader(windows.map(torch::data::transforms::Stack<>()), sampler,
                                              static_cast<std::size_t>(options.batch));
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(options.rate).betas({0.9, 0.95}));

  const Budget budget(options);
  double done = 0;
  std::int64_t steps = 0;
  for (std::size_t epoch = 0; done < 1; ++epoch) {
    sampler.set_epoch(epoch);
    for (const auto& batch : *loader) {
      optimizer.param_groups().front().options().set_lr(learning_rate(options.rate, done));
      optimizer.zero_grad();
      const auto loss = loss_of(model->forward(batch.data), batch.target);
      loss.backward();  // (4) The gradients are now the average over all ranks.
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();

      // (5) The mean loss, for the report; and one opinion of the time, since ranks that differed on the
      // learning rate or on the last step would drift apart. A collective gives the same bits to all.
      const auto shared = torch::tensor({loss.item<double>(), budget.done(++steps)}, torch::kDouble);
      lockstep::all_reduce(shared, {.op = lockstep::ReduceOp::kAvg});
      done = shared[1].item<double>();
      report.step(shared[0].item<double>(), done, model->stats().exposed_seconds);
      if (done >= 1) break;
    }
  }
}

// Lets the model continue `text`, one character at a time, each drawn by its probability.
std::string continue_text(GptImpl& model, const Alphabet& alphabet, std::string text, int n_characters) {
  const torch::NoGradGuard no_grad;
  const auto context = static_cast<std::size_t>(model.options().context);
  for (int i = 0; i < n_characters; ++i) {
    const auto seen = text.substr(text.size() - std::min(text.size(), context));
    const auto scores = model.forward(torch::tensor(alphabet.encode(seen)).unsqueeze(0)).select(1, -1);
    const auto probabilities = torch::softmax(scores / 0.7, -1);
    text += alphabet.decode(torch::multinomial(probabilities, 1).item<std::int64_t>());
  }
  return text;
}

// Whether every rank holds the parameters of this one, to the last bit.
bool same_on_all_ranks(const torch::nn::Module& model) {
  auto differences = torch::zeros(1, torch::kLong);
  for (const auto& parameter : model.parameters()) {
    const auto mine = parameter.detach().view(torch::kInt);
    auto theirs = mine.clone();
    lockstep::broadcast(theirs, {.src = 0});
    differences += (mine != theirs).sum();
  }
  lockstep::all_reduce(differences);
  return differences.item<std::int64_t>() == 0;
}

int run(const Options& options) {
  // (1) The environment says who takes part; with no launcher, this process alone.
  lockstep::init_process_group();
  const bool is_first = lockstep::get_rank() == 0;
  const int n_ranks = lockstep::get_world_size();

  const std::string text = load_text(options.text);
  const Alphabet alphabet(text);
  torch::manual_seed(1);
  Gpt net(GptOptions{.vocabulary = alphabet.size()});
  // (2) From here on all ranks hold the parameters of rank 0, and backward() averages the gradients. They lie
  // in the buckets that are averaged: nothing is copied.
  auto model = lockstep::DistributedDataParallel(net, {.gradient_as_bucket_view = true});

  Report report({.ranks = n_ranks,
                 .threads = at::get_num_threads(),
                 .batch = options.batch,
                 .tokens_per_step = n_ranks * options.batch * net->options().context,
                 .uniform_loss = std::log(static_cast<double>(alphabet.size()))},
                options.quiet || !is_first);
  train(model, torch::tensor(alphabet.encode(text)), options, report);

  const bool same = same_on_all_ranks(*net);
  if (is_first && !options.quiet) {
    const std::string sample = continue_text(*net, alphabet, "The ", 400);
    std::cout << "\nsample\n" << sample << "\n";
    report.print_summary();
    if (n_ranks > 1) {
      std::cout << n_ranks << " ranks hold " << (same ? "the same" : "DIFFERENT")
                << " parameters, bit for bit\n";
    }
    if (!options.out.empty()) report.write_pictures(options.out, sample);
  }
  if (is_first && !options.json.empty()) report.write_json(options.json);
  // (6) Every rank leaves.
  lockstep::destroy_process_group();
  return same ? 0 : 1;
}

}  // namespace
}  // namespace char_gpt

int main(int argc, char** argv) {
  return lockstep::run_main(char_gpt::run, char_gpt::parse_options(argc, argv));
}
