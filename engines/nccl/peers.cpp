#include "engines/nccl/peers.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/detail/host_store.h"

namespace lockstep::nccl_plugin {
namespace {

using base::cat;
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kSlots = 32;
constexpr char kSeparator = '\x1f';

void copy_text(char* to, std::size_t capacity, const std::string& text) {
  const std::size_t n = std::min(text.size(), capacity - 1);
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

template <class Number>
Number number_in(std::string_view text, Number otherwise = 0) {
  Number number = otherwise;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

// For the store. Fields as in Page::Told.
std::string pack(const Failure& failure) {
  const LostPeer peer = failure.peer.value_or(LostPeer{});
  return cat(static_cast<int>(failure.kind), kSeparator, peer.rank.value_or(-1), kSeparator,
             peer.pid.value_or(-1), kSeparator, peer.cause, kSeparator, failure.message);
}

Failure told(int kind, int rank, std::int64_t pid, std::string cause, std::string message) {
  Failure failure{.kind = static_cast<ErrorKind>(std::clamp(kind, 0, static_cast<int>(ErrorKind::kInternal))),
                  .message = std::move(message),
                  .family = ErrorFamily::kBackend,
                  .peer = {}};
  if (rank >= 0) failure.peer = LostPeer{.rank = rank, .pid = pid, .cause = std::move(cause)};
  return failure;
}

// Another rank wrote it: missing fields stay empty, numbers are clamped.
Failure unpack(const std::string& text) {
  std::istringstream in(text);
  std::string kind, rank, pid, cause, message;
  std::getline(in, kind, kSeparator);
  std::getline(in, rank, kSeparator);
  std::getline(in, pid, kSeparator);
  std::getline(in, cause, kSeparator);
  std::getline(in, message, '\0');
  return told(number_in<int>(kind), number_in<int>(rank, -1), number_in<std::int64_t>(pid, -1), cause,
              message);
}

}  // namespace

// Records of one writer for one reader: a ring. The writer adds to `written` after the record, the reader to `read` after
// it has copied one; release and acquire on both.
struct Peers::Box {
  std::atomic<std::uint64_t> written;
  std::atomic<std::uint64_t> read;
  Record records[kSlots];
};

// One rank's page, written by it and read by the others of its host; a Box's `read` is the reader's. All zero at first.
struct alignas(64) Peers::Page {
  enum State : std::uint32_t { kJoined = 0, kBroken = 1, kLeft = 2 };
  local::Attendance attendance;
  // Set once, with release, after what it tells of: `told` for kBroken, `completed` for kLeft.
  std::atomic<std::uint32_t> state;
  std::atomic<std::uint64_t> called;
  std::uint64_t completed;
  struct Told {
    std::int32_t kind, rank;
    std::int64_t pid;
    char cause[256];
    char message[1024];
  } told;

  // For each rank of the host, by its place; after the page.
  Box* boxes() { return reinterpret_cast<Box*>(this + 1); }
  static std::size_t bytes(std::size_t n_local) { return sizeof(Page) + n_local * sizeof(Box); }
};

Peers::Peers(const lockstep_comm_config& config)
    : rank_(config.rank),
      size_(config.size),
      store_(config.host),
      members_(static_cast<std::size_t>(size_)),
      pages_(static_cast<std::size_t>(size_), nullptr),
      left_(static_cast<std::size_t>(size_)),
      outbox_(static_cast<std::size_t>(size_)),
      remote_(static_cast<std::size_t>(size_)) {
  for (auto& each : left_) each = kHere;
  exchange(config);
  meet_on_host(config);
}

// Rank 0 reads what all wrote and relays it: a few requests per rank.
void Peers::exchange(const lockstep_comm_config& config) {
  const auto mine = [&](int rank) -> Member& { return members_[static_cast<std::size_t>(rank)]; };
  mine(rank_) = {.pid = ::getpid(), .host = base::host_identity()};
  if (size_ == 1) return;
  const auto missing = [&](int rank) {
    base::raise(ErrorKind::kTimeout,
                cat("rank ", rank_, " waits for rank ", rank, " to join group \"",
                    config.name != nullptr ? config.name : "", "\": the time is over"),
                ErrorFamily::kBackend);
  };
  store_.set(cat("nccl/member/", rank_), cat(mine(rank_).pid, ' ', mine(rank_).host));
  std::string all;
  if (rank_ == 0) {
    for (int r = 0; r < size_; ++r) {
      const auto text = store_.get(cat("nccl/member/", r), config.deadline_ns);
      if (!text) missing(r);
      all += *text + '\n';
    }
    store_.set("nccl/members", all);
  } else {
    const auto text = store_.get("nccl/members", config.deadline_ns);
    if (!text) missing(0);
    all = *text;
  }
  std::istringstream lines(all);
  for (int r = 0; r < size_; ++r) {
    if (!(lines >> mine(r).pid >> mine(r).host))
      base::raise(ErrorKind::kInternal, "the members of the group are not in its store",
                  ErrorFamily::kBackend);
  }
}

void Peers::meet_on_host(const lockstep_comm_config& config) {
  const std::string& host = members_[static_cast<std::size_t>(rank_)].host;
  for (int r = 0; r < size_; ++r) {
    if (members_[static_cast<std::size_t>(r)].host == host) local_.push_back(r);
  }
  has_remote_ = static_cast<int>(local_.size()) < size_;
  const auto place = static_cast<int>(std::ranges::find(local_, rank_) - local_.begin());
  const std::size_t n_bytes = Page::bytes(local_.size());
  own_ = local::SegmentTable::of_process().create("lockstep-nccl", n_bytes);
  own_->commit(0, n_bytes);
  comm::HostStore store(store_.host(), cat("nccl/host/", local_.front(), '/'));
  met_ = local::meet(store, {.rank = place,
                             .size = static_cast<int>(local_.size()),
                             .group = config.name != nullptr ? config.name : "",
                             .version = kVersion,
                             .own = own_,
                             .attendance_at = offsetof(Page, attendance),
                             .deadline = Deadline::from_monotonic_ns(config.deadline_ns)});
  for (std::size_t i = 0; i < local_.size(); ++i) {
    if (met_[i].segment->size() < n_bytes)
      base::raise(ErrorKind::kInternal, cat("the page of rank ", local_[i], " is too small"),
                  ErrorFamily::kBackend);
    pages_[static_cast<std::size_t>(local_[i])] = reinterpret_cast<Page*>(met_[i].segment->data());
  }
}

std::string Peers::who(int rank) const {
  return cat("rank ", rank, " (pid ", pid(rank), ")");
}

// ---- telling

void Peers::tell_broken(const Failure& failure) noexcept {
  try {
    Page& page = *pages_[static_cast<std::size_t>(rank_)];
    if (page.state.load(std::memory_order_relaxed) != Page::kJoined) return;
    const LostPeer peer = failure.peer.value_or(LostPeer{});
    page.told.kind = static_cast<std::int32_t>(failure.kind);
    page.told.rank = peer.rank.value_or(-1);
    page.told.pid = peer.pid.value_or(-1);
    copy_text(page.told.cause, sizeof page.told.cause, peer.cause);
    copy_text(page.told.message, sizeof page.told.message, failure.message);
    page.state.store(Page::kBroken, std::memory_order_release);
    news_value_ = pack(failure);
    news_key_ = "nccl/broken";
  } catch (...) {
    // No memory for what other hosts are told.
  }
}

void Peers::tell_left(std::uint64_t completed) noexcept {
  try {
    Page& page = *pages_[static_cast<std::size_t>(rank_)];
    if (page.state.load(std::memory_order_relaxed) != Page::kJoined) return;
    page.completed = completed;
    page.state.store(Page::kLeft, std::memory_order_release);
    news_value_ = cat(completed);
    news_key_ = cat("nccl/left/", rank_);
  } catch (...) {
    // As above.
  }
}

void Peers::publish() noexcept {
  try {
    if (has_remote_ && !news_key_.empty()) store_.set(news_key_, news_value_);
  } catch (...) {
    // The store is gone.
  }
}

void Peers::tell_called(std::uint64_t n) noexcept {
  pages_[static_cast<std::size_t>(rank_)]->called.store(n, std::memory_order_relaxed);
}

// ---- hearing

Failure Peers::lost(int rank, std::string cause) const {
  return {.kind = ErrorKind::kPeerLost,
          .message = cat(who(rank), " is lost: ", cause),
          .family = ErrorFamily::kBackend,
          .peer = LostPeer{.rank = rank, .pid = pid(rank), .cause = cause}};
}

std::optional<Failure> Peers::local_news(int rank) {
  const auto place = static_cast<std::size_t>(std::ranges::find(local_, rank) - local_.begin());
  const Page& page = *pages_[static_cast<std::size_t>(rank)];
  // Before the state: a process that ended in order had left by then.
  const bool ended = met_[place].process.lost();
  const auto state = page.state.load(std::memory_order_acquire);
  if (state == Page::kLeft) {
    left_[static_cast<std::size_t>(rank)] = page.completed;
    return std::nullopt;
  }
  if (state == Page::kBroken) {
    const auto text = [](const char* from, std::size_t capacity) {
      return std::string(from, ::strnlen(from, capacity));
    };
    return told(page.told.kind, page.told.rank, page.told.pid, text(page.told.cause, sizeof page.told.cause),
                text(page.told.message, sizeof page.told.message));
  }
  if (!ended) return std::nullopt;
  // The launcher knows more than the kernel tells; it may need a moment to say so, which is not waited for here.
  if (const auto text = store_.look(cat("/lockstep/exit/", rank))) return lost(rank, *text);
  return lost(rank,
              met_[place].process.cause(Deadline::after(Milliseconds(20))).value_or("its process ended"));
}

// One of the ranks of other hosts at a time: a round through all of them takes as many calls.
std::optional<Failure> Peers::store_news() {
  if (const auto text = store_.look("nccl/broken")) return unpack(*text);
  for (int tried = 0; tried < size_; ++tried) {
    next_remote_ = (next_remote_ + 1) % size_;
    if (!is_local(next_remote_) && !left(next_remote_)) break;
  }
  const int rank = next_remote_;
  if (is_local(rank) || left(rank)) return std::nullopt;
  if (const auto text = store_.look(cat("nccl/left/", rank))) {
    left_[static_cast<std::size_t>(rank)] = number_in<std::uint64_t>(*text);
  } else if (const auto exit = store_.look(cat("/lockstep/exit/", rank))) {
    return lost(rank, *exit);
  }
  return std::nullopt;
}

std::optional<Failure> Peers::news(bool slow) {
  for (const int rank : local_) {
    if (rank == rank_ || left(rank)) continue;
    if (auto failure = local_news(rank)) return failure;
  }
  return slow && has_remote_ ? store_news() : std::nullopt;
}

std::string Peers::behind(std::uint64_t n) const {
  std::string text;
  for (const int rank : local_) {
    if (rank == rank_ || pages_[static_cast<std::size_t>(rank)]->called.load(std::memory_order_relaxed) >= n)
      continue;
    text += cat(text.empty() ? "" : ", ", who(rank));
  }
  return text;
}

// ---- records

Peers::Box* Peers::box(int writer, int reader) const {
  Page* const page = pages_[static_cast<std::size_t>(writer)];
  if (page == nullptr) return nullptr;
  const auto place = std::ranges::find(local_, reader) - local_.begin();
  return page->boxes() + place;
}

bool Peers::push(int to, const Record& record) {
  if (!is_local(to)) {
    Remote& remote = remote_[static_cast<std::size_t>(to)];
    if (remote.written - remote.acknowledged >= kSlots) return false;
    remote.unread.push_back(record);
    ++remote.written;
    return true;
  }
  Box& mine = *box(rank_, to);
  const std::uint64_t written = mine.written.load(std::memory_order_relaxed);
  if (written - mine.read.load(std::memory_order_acquire) >= kSlots) return false;
  mine.records[written % kSlots] = record;
  mine.written.store(written + 1, std::memory_order_release);
  return true;
}

void Peers::send(int to, const Record& record) {
  outbox_[static_cast<std::size_t>(to)].push_back(record);
}

// For another host: the records that the reader has not acknowledged, written anew under one key whenever they change, so
// that the store does not grow.
void Peers::flush() {
  for (int to = 0; to < size_; ++to) {
    auto& waiting = outbox_[static_cast<std::size_t>(to)];
    Remote& remote = remote_[static_cast<std::size_t>(to)];
    if (waiting.empty()) continue;
    if (!is_local(to)) {
      if (const auto text = store_.look(cat("nccl/read/", rank_, '-', to)))
        remote.acknowledged = std::min(number_in<std::uint64_t>(*text), remote.written);
      while (remote.unread.size() > remote.written - remote.acknowledged) remote.unread.pop_front();
    }
    bool any = false;
    while (!waiting.empty() && push(to, waiting.front())) {
      waiting.pop_front();
      any = true;
    }
    if (is_local(to) || !any) continue;
    std::string value(sizeof(std::uint64_t) + remote.unread.size() * sizeof(Record), '\0');
    const std::uint64_t first = remote.written - remote.unread.size();
    std::memcpy(value.data(), &first, sizeof first);
    for (std::size_t i = 0; i < remote.unread.size(); ++i)
      std::memcpy(value.data() + sizeof first + i * sizeof(Record), &remote.unread[i], sizeof(Record));
    store_.set(cat("nccl/box/", rank_, '-', to), value);
  }
}

std::vector<Record> Peers::receive(int from) {
  std::vector<Record> records;
  if (Box* const theirs = is_local(from) ? box(from, rank_) : nullptr) {
    std::uint64_t read = theirs->read.load(std::memory_order_relaxed);
    for (const auto written = theirs->written.load(std::memory_order_acquire); read < written; ++read)
      records.push_back(theirs->records[read % kSlots]);
    theirs->read.store(read, std::memory_order_release);
    return records;
  }
  const auto value = store_.look(cat("nccl/box/", from, '-', rank_));
  std::uint64_t first = 0;
  if (!value || value->size() < sizeof first) return records;
  std::memcpy(&first, value->data(), sizeof first);
  const std::size_t n = (value->size() - sizeof first) / sizeof(Record);
  Remote& remote = remote_[static_cast<std::size_t>(from)];
  for (std::size_t i = 0; i < n; ++i) {
    if (first + i < remote.read) continue;
    Record record;
    std::memcpy(&record, value->data() + sizeof first + i * sizeof record, sizeof record);
    records.push_back(record);
  }
  if (records.empty()) return records;
  remote.read = first + n;
  store_.set(cat("nccl/read/", from, '-', rank_), cat(remote.read));
  return records;
}

}  // namespace lockstep::nccl_plugin
