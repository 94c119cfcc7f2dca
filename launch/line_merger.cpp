#include "launch/line_merger.h"

#include <algorithm>

#include "lockstep/base/detail/text.h"

namespace lockstep::launch {

LineMerger::LineMerger(int n_workers, Emit emit)
    : emit_(std::move(emit)),
      next_number_(static_cast<std::size_t>(n_workers), 0),
      ended_(static_cast<std::size_t>(n_workers), false),
      n_live_(static_cast<std::size_t>(n_workers)) {}

// A line joins the first equal one that its worker has not passed yet, so that the lines of one worker keep
// their order: next_number_ is the first position it may use. Otherwise it is queued at the end.
void LineMerger::add(int worker, Stream stream, std::string_view line, std::int64_t now_ns) {
  std::uint64_t& next = next_number_[static_cast<std::size_t>(worker)];
  std::size_t at = next > front_number_ ? static_cast<std::size_t>(next - front_number_) : 0;
  while (at < waiting_.size() && !(waiting_[at].stream == stream && waiting_[at].line == line)) ++at;
  if (at == waiting_.size()) {
    waiting_.push_back({.workers = {}, .stream = stream, .line = std::string(line), .since_ns = now_ns});
  }
  auto& workers = waiting_[at].workers;
  workers.insert(std::upper_bound(workers.begin(), workers.end(), worker), worker);
  next = front_number_ + at + 1;
  flush_complete();
  if (waiting_.size() > kMaxWaiting) flush_front();
}

void LineMerger::end_worker(int worker) {
  if (ended_[static_cast<std::size_t>(worker)]) return;
  ended_[static_cast<std::size_t>(worker)] = true;
  --n_live_;
  flush_complete();
}

void LineMerger::flush_due(std::int64_t now_ns) {
  while (!waiting_.empty() && now_ns >= waiting_.front().since_ns + kWindowNs) flush_front();
  flush_complete();
}

void LineMerger::flush_all() {
  while (!waiting_.empty()) flush_front();
}

Deadline LineMerger::due() const {
  if (waiting_.empty()) return Deadline::never();
  return Deadline::from_monotonic_ns(waiting_.front().since_ns + kWindowNs);
}

void LineMerger::flush_front() {
  const Waiting& front = waiting_.front();
  emit_(front.workers, front.stream, front.line);
  waiting_.pop_front();
  ++front_number_;
}

// Only from the front: lines behind one that still waits for other workers wait with it, for kWindowNs at
// most.
void LineMerger::flush_complete() {
  while (!waiting_.empty()) {
    const auto& workers = waiting_.front().workers;
    const auto n_live = std::count_if(workers.begin(), workers.end(), [this](int worker) {
      return !ended_[static_cast<std::size_t>(worker)];
    });
    if (static_cast<std::size_t>(n_live) < n_live_) return;
    flush_front();
  }
}

std::string rank_set_text(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += last == i ? base::cat(ranks[i]) : base::cat(ranks[i], last == i + 1 ? "," : "-", ranks[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace lockstep::launch
