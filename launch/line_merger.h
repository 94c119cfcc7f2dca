// Merges the lines of all workers; equal lines of several workers are printed once: "[0-3] epoch 1".
//
// A line is held briefly for equal ones. Each worker's lines keep their order; there is no order between
// workers. The caller passes the time, in nanoseconds of the monotonic clock. Thread safety: none.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::launch {

enum class Stream { kOut, kErr };

class LineMerger {
 public:
  // `workers` is sorted and not empty.
  using Emit = std::function<void(const std::vector<int>& workers, Stream stream, std::string_view line)>;

  static constexpr std::int64_t kWindowNs = 150'000'000;  // how long a line is held
  static constexpr std::size_t kMaxWaiting = 512;         // lines; beyond that the oldest is emitted at once

  LineMerger(int n_workers, Emit emit);

  void add(int worker, Stream stream, std::string_view line, std::int64_t now_ns);
  // The worker prints no more; lines are no longer held for it.
  void end_worker(int worker);
  void flush_due(std::int64_t now_ns);
  void flush_all();
  Deadline due() const;

 private:
  struct Waiting {
    std::vector<int> workers;
    Stream stream;
    std::string line;
    std::int64_t since_ns;
  };
  void flush_front();
  void flush_complete();

  const Emit emit_;
  std::deque<Waiting> waiting_;
  std::uint64_t front_number_ = 0;  // lines are numbered; this is the number of waiting_.front()
  std::vector<std::uint64_t>
      next_number_;  // per worker: its next line may merge with this one or a later one
  std::vector<bool> ended_;
  std::size_t n_live_;
};

// {0,1,2,5} is "0-2,5".
std::string rank_set_text(const std::vector<int>& ranks);

}  // namespace lockstep::launch
