#include "launch/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
  return text;
}

}  // namespace

Output::Output(OutputOptions options)
    : options_(std::move(options)),
      // The callbacks hold `this`: an Output must not be moved.
      merger_(options_.n_workers, [this](const std::vector<int>& workers, Stream stream,
                                         std::string_view line) { print(workers, stream, line); }),
      last_errors_(static_cast<std::size_t>(options_.n_workers)) {
  // The order of sources_ is what worker_stdout() and worker_stderr() index: out and err of each worker in
  // turn, or the one err when raw.
  for (int worker = 0; worker < options_.n_workers; ++worker) {
    if (!raw()) add_source(worker, Stream::kOut);
    add_source(worker, Stream::kErr);
  }
}

void Output::add_source(int worker, Stream stream) {
  int ends[2];
  // O_CLOEXEC: a worker that inherited another one's end would keep that pipe open after its worker has died,
  // and end of file would never be read.
  if (::pipe2(ends, O_CLOEXEC) != 0)
    base::raise(base::system_failure(errno, "make a pipe for a worker's output"));
  Source source{worker, stream, base::Fd(ends[0]), base::Fd(ends[1]), nullptr};
  // Only our end: the worker's must block as any pipe does.
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  source.lines = std::make_unique<LineAssembler>(
      [this, worker, stream](std::string_view line) { take_line(worker, stream, line); });
  sources_.push_back(std::move(source));
}

std::optional<int> Output::worker_stdout(int worker) const {
  if (raw()) return std::nullopt;
  return sources_[static_cast<std::size_t>(2 * worker)].write_end.get();
}

int Output::worker_stderr(int worker) const {
  return sources_[static_cast<std::size_t>(raw() ? 0 : 2 * worker + 1)].write_end.get();
}

void Output::close_worker_ends() {
  // From here on the workers alone hold the write ends: end of file means that all processes that had one are
  // gone.
  for (Source& source : sources_) source.write_end.reset();
}

// Backpressure: while the terminal or file takes no more, workers' pipes are not read, and workers block in
// write as they would without a launcher. Nothing is dropped, and memory is bounded.
void Output::add_to(std::vector<pollfd>& fds) const {
  for (const OutputSink* sink : {&out_, &err_}) {
    if (!sink->empty()) fds.push_back({.fd = sink->fd(), .events = POLLOUT, .revents = 0});
  }
  if (out_.full() || err_.full()) return;
  for (const Source& source : sources_) {
    if (source.read_end) fds.push_back({.fd = source.read_end.get(), .events = POLLIN, .revents = 0});
  }
}

void Output::handle() {
  // One time for the whole round, which reads and flushes compare with.
  now_ns_ = Deadline::now().monotonic_ns();
  out_.pump();
  err_.pump();
  for (Source& source : sources_) {
    if (source.read_end && !out_.full() && !err_.full()) read(source);
    source.lines->flush_due(now_ns_);
  }
  merger_.flush_due(now_ns_);
}

void Output::read(Source& source) {
  std::array<char, 16 << 10> bytes;
  // One read per source and round, so that a worker that prints without end does not starve the others.
  const ssize_t n = ::read(source.read_end.get(), bytes.data(), bytes.size());
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n > 0) {
    const std::string_view text(bytes.data(), static_cast<std::size_t>(n));
    if (raw()) err_.write(text);
    source.lines->feed(text, now_ns_);
    return;
  }
  // End of file, or an error that will not pass. The rest of an unfinished line is printed; when this was the
  // worker's last stream, the merger no longer waits for it.
  source.read_end.reset();
  source.lines->finish();
  const bool has_more = std::any_of(sources_.begin(), sources_.end(), [&](const Source& other) {
    return other.worker == source.worker && bool(other.read_end);
  });
  if (!has_more) merger_.end_worker(source.worker);
}

Deadline Output::due() const {
  Deadline due = merger_.due();
  for (const Source& source : sources_) due = std::min(due, source.lines->due());
  return due;
}

void Output::finish() {
  for (Source& source : sources_) {
    // All holders of the other end are dead, so this ends; a descriptor that was sent elsewhere must not stop
    // us.
    while (source.read_end) {
      pollfd ready{.fd = source.read_end.get(), .events = POLLIN, .revents = 0};
      if (::poll(&ready, 1, 0) <= 0) break;
      now_ns_ = Deadline::now().monotonic_ns();
      read(source);
      out_.drain(Deadline::never());
      err_.drain(Deadline::never());
    }
    source.lines->finish();
  }
  merger_.flush_all();
  out_.drain(Deadline::never());
  err_.drain(Deadline::never());
}

// Workers' lines that wait to be merged came earlier, so they are printed earlier.
void Output::say(std::string_view text) {
  merger_.flush_all();
  err_.write(base::cat("lockstep: ", text, "\n"));
}

const std::deque<std::string>& Output::last_errors(int worker) const {
  return last_errors_[static_cast<std::size_t>(worker)];
}

void Output::take_line(int worker, Stream stream, std::string_view line) {
  if (stream == Stream::kErr) {
    auto& kept = last_errors_[static_cast<std::size_t>(worker)];
    kept.emplace_back(line);
    if (kept.size() > kKeptLines) kept.pop_front();
  }
  // The bytes have been forwarded already, in read(); the line is only kept for the failure report.
  if (raw()) return;
  if (!options_.prefix) {
    sink(stream).write(base::cat(line, "\n"));
    return;
  }
  merger_.add(worker, stream, line, now_ns_);
}

void Output::print(const std::vector<int>& workers, Stream stream, std::string_view line) {
  OutputSink& target = sink(stream);
  target.write(base::cat(prefix(workers, target), line, "\n"));
}

std::string Output::prefix(const std::vector<int>& workers, const OutputSink& sink) const {
  std::vector<int> ranks = workers;
  for (int& rank : ranks) rank += options_.first_rank;
  std::string text = base::cat("[", rank_set_text(ranks), "]");
  if (!options_.prefix_template.empty()) {
    text = replaced(options_.prefix_template, "${role_name}", options_.role);
    text = replaced(std::move(text), "${rank}", rank_set_text(ranks));
    return replaced(std::move(text), "${local_rank}", rank_set_text(workers));
  }
  if (!options_.colour || !sink.is_terminal()) return text + " ";
  // One colour per worker; lines of several are bold.
  static constexpr int kColours[] = {36, 32, 33, 35, 34, 31};
  const int code =
      workers.size() > 1 ? 1 : kColours[static_cast<std::size_t>(workers[0]) % std::size(kColours)];
  return base::cat("\x1b[", code, "m", text, "\x1b[0m ");
}

}  // namespace lockstep::launch
