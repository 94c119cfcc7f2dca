// Forwards the workers' output to the launcher's own: pipes, whole lines, prefixes, and the last lines of
// each worker's stderr for the failure report.
//
// Driven by the launcher's poll loop: add_to(fds), poll, handle(). Thread safety: none.
#pragma once

#include <poll.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/line_assembler.h"
#include "launch/line_merger.h"
#include "launch/output_sink.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"

namespace lockstep::launch {

struct OutputOptions {
  int n_workers = 1;
  int first_rank = 0;  // first rank of this host's workers
  std::string role = "default";
  bool prefix = true;             // false: lines as received
  std::string prefix_template{};  // with ${role_name}, ${rank}, ${local_rank}; empty: "[rank] "
  bool colour = true;             // on terminals
};

class Output {
 public:
  // Creates the pipes. A single worker keeps the launcher's own stdout, and its stderr is forwarded
  // unmodified. Raises kResource when descriptors run out.
  explicit Output(OutputOptions options);

  // The worker's descriptors 1 and 2; nothing: the launcher's own.
  std::optional<int> worker_stdout(int worker) const;
  int worker_stderr(int worker) const;
  // Call once the workers have them.
  void close_worker_ends();

  void add_to(std::vector<pollfd>& fds) const;
  // Reads available input and prints what is due.
  void handle();
  Deadline due() const;
  // The workers have ended: prints the rest and waits until it is written.
  void finish();

  // Prints a line of the launcher itself on stderr.
  void say(std::string_view text);
  const std::deque<std::string>& last_errors(int worker) const;

 private:
  struct Source {
    int worker;
    Stream stream;
    base::Fd read_end;
    base::Fd write_end;
    std::unique_ptr<LineAssembler> lines;
  };
  void add_source(int worker, Stream stream);
  void take_line(int worker, Stream stream, std::string_view line);
  void print(const std::vector<int>& workers, Stream stream, std::string_view line);
  std::string prefix(const std::vector<int>& workers, const OutputSink& sink) const;
  void read(Source& source);
  bool raw() const { return options_.n_workers == 1; }
  OutputSink& sink(Stream stream) { return stream == Stream::kOut ? out_ : err_; }

  static constexpr std::size_t kKeptLines = 20;

  const OutputOptions options_;
  OutputSink out_{1};
  OutputSink err_{2};
  LineMerger merger_;
  std::vector<Source> sources_;
  std::vector<std::deque<std::string>> last_errors_;
  std::int64_t now_ns_ = 0;
};

}  // namespace lockstep::launch
