// For tests: waits are logged early, and the lines are kept instead of printed.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/log.h"

namespace lockstep::testing {

// One at a time. All methods, any thread.
class SlowLines {
 public:
  explicit SlowLines(Milliseconds time) {
    kept().lines.clear();
    base::set_slow_wait_time(time);
    set_log_sink([](LogLevel, std::string_view text) {
      if (!text.starts_with("slow: ")) return;
      const std::lock_guard lock(kept().mutex);
      kept().lines.emplace_back(text);
    });
  }
  ~SlowLines() {
    set_log_sink(nullptr);
    base::set_slow_wait_time(Milliseconds(10'000));
  }
  SlowLines(const SlowLines&) = delete;
  SlowLines& operator=(const SlowLines&) = delete;

  // Those that contain `part`, in order.
  std::vector<std::string> with(std::string_view part) const {
    const std::lock_guard lock(kept().mutex);
    std::vector<std::string> found;
    for (const auto& line : kept().lines) {
      if (line.find(part) != std::string::npos) found.push_back(line);
    }
    return found;
  }
  // The first of them, once there is one; "" when none comes within half a minute.
  std::string await(std::string_view part) const {
    const Deadline patience = Deadline::after(std::chrono::seconds(30));
    for (;;) {
      if (const auto found = with(part); !found.empty()) return found.front();
      if (patience.expired()) return "";
      std::this_thread::sleep_for(Milliseconds(1));
    }
  }

 private:
  struct Kept {
    std::mutex mutex;
    std::vector<std::string> lines;  // guarded by mutex
  };
  static Kept& kept() {
    static Kept lines;
    return lines;
  }
};

}  // namespace lockstep::testing
