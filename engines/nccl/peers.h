// The other ranks of a communicator, beside NCCL: who they are, whether they live, what they say when the group breaks, and
// the short records through which messages are matched. NCCL has none of it: it neither reports a peer that died nor knows
// tags.
//
// Ranks of one host meet once (lockstep/local) and share a page each: a look at it costs a load, and their processes are
// watched by the kernel's descriptors. Between hosts the key-value space serves: slower, and a rank that ends without a
// launcher to tell is noticed by a deadline only.
//
//   key                what
//   nccl/member/<r>    pid and host of rank r; rank 0 relays all of them under nccl/members
//   nccl/broken        the first failure, for ranks of other hosts
//   nccl/left/<r>      rank r has left in order; the value is how many collectives it has completed
//   nccl/box/<w>-<r>   records of writer w for reader r on another host; nccl/read/<w>-<r>: how many the reader has taken
//
// Thread safety: any thread, except that news() and the records belong to one thread at a time.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engines/nccl/group_store.h"
#include "lockstep/base/error.h"
#include "lockstep/local/meeting.h"

namespace lockstep::nccl_plugin {

// What ranks tell each other about messages. `kAnnounce`: the writer has posted a send to the reader. `kGo`: the writer has
// matched the reader's send `sequence`; both issue it next.
struct Record {
  enum Kind : std::uint32_t { kAnnounce = 1, kGo = 2 };
  std::uint32_t kind = 0;
  std::int32_t tag = 0;
  std::uint32_t dtype = 0;
  std::uint32_t reserved = 0;
  std::uint64_t count = 0;
  std::uint64_t sequence = 0;
};
static_assert(sizeof(Record) == 32);

class Peers {
 public:
  // Collective; blocks until the deadline at most. Raises kTimeout, kPeerLost, kSystem, kResource.
  explicit Peers(const lockstep_comm_config& config);
  Peers(const Peers&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // "rank 2 (pid 4711)".
  std::string who(int rank) const;
  std::int64_t pid(int rank) const { return members_[static_cast<std::size_t>(rank)].pid; }
  bool is_local(int rank) const { return pages_[static_cast<std::size_t>(rank)] != nullptr; }
  const GroupStore& store() const { return store_; }

  // ---- telling the others. Only the first of these two counts, and they exclude each other in time: the caller sees to it.
  // Ranks of this host know at once, the others after publish().
  void tell_broken(const Failure& failure) noexcept;
  // completed: of this rank's collectives. The others see that later ones cannot succeed.
  void tell_left(std::uint64_t completed) noexcept;
  // A request to the store. One that cannot be reached is ignored: then the others notice by their deadlines.
  void publish() noexcept;
  // How many collectives this rank has called: whoever runs out of time names those that are behind.
  void tell_called(std::uint64_t n) noexcept;

  // ---- hearing of them
  // A failure that another rank has told, or a rank whose process is lost. `slow`: also what takes requests to the store.
  std::optional<Failure> news(bool slow);
  // Left in order, as far as news() has seen; then the number of collectives it had completed.
  std::optional<std::uint64_t> left(int rank) const {
    const std::uint64_t completed = left_[static_cast<std::size_t>(rank)].load(std::memory_order_relaxed);
    return completed == kHere ? std::nullopt : std::optional(completed);
  }
  // Ranks of this host that have called fewer collectives than `n`, as text: "rank 1 (pid 9)"; empty when none is behind.
  std::string behind(std::uint64_t n) const;

  // ---- records
  void send(int to, const Record& record);
  // All that arrived from `from`, in order.
  std::vector<Record> receive(int from);
  // Sends what had no room before.
  void flush();

 private:
  struct Member {
    std::int64_t pid = -1;
    std::string host;
  };
  struct Page;
  struct Box;

  void exchange(const lockstep_comm_config& config);
  void meet_on_host(const lockstep_comm_config& config);
  std::optional<Failure> local_news(int rank);
  std::optional<Failure> store_news();
  Failure lost(int rank, std::string cause) const;
  Box* box(int writer, int reader) const;
  bool push(int to, const Record& record);

  const int rank_, size_;
  const GroupStore store_;
  std::vector<Member> members_;  // constant after construction, as all up to left_
  std::vector<int> local_;       // ranks of this host in order
  local::Mapping own_;
  std::vector<local::LocalPeer> met_;  // by place in local_
  std::vector<Page*> pages_;           // by rank; null: on another host
  bool has_remote_ = false;

  static constexpr std::uint64_t kHere = ~0ull;
  std::vector<std::atomic<std::uint64_t>> left_;  // by rank: how many collectives it had completed, or kHere
  int next_remote_ = 0;                           // whom store_news() looks at next
  std::string news_key_, news_value_;             // what publish() writes; set by the first tell_

  // Records for each rank that wait for room, or for flush().
  std::vector<std::deque<Record>> outbox_;
  struct Remote {
    std::uint64_t written = 0, acknowledged = 0;  // to this rank
    std::deque<Record> unread;                    // of what was written
    std::uint64_t read = 0;                       // from this rank
  };
  std::vector<Remote> remote_;
};

}  // namespace lockstep::nccl_plugin
