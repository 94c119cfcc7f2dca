// The sending half of a client's connection. A request with a reply goes out before the call returns.
// Requests without one (set, append, queue_push) are sent one by one as well, until several come in a row:
// then they are gathered in memory, and a thread sends what there is whenever it gets to run, so that one
// system call and, on a sealed connection, one record carry many of them. Order is kept: whatever comes next
// goes out behind what was gathered.
//
//   post  post ... (kGatherAfter in a row)   send: what was gathered, then the request
//   one by one ->  gathering  -------------> one by one
//
// A failure of the thread is raised by the next post() or send().
//
// Thread safety: post() and send() from one thread at a time; reading the channel meanwhile is allowed. Not
// for use in a forked child: the stream is the parent's (and so are the numbers of its records); there the
// calls raise kUsage.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/forks.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/net/channel.h"

namespace lockstep::internal {

class TcpWriter {
 public:
  static constexpr int kGatherAfter = 16;

  explicit TcpWriter(net::Channel channel);
  // What is still gathered is dropped: send() something before.
  ~TcpWriter();
  TcpWriter(const TcpWriter&) = delete;
  TcpWriter& operator=(const TcpWriter&) = delete;

  // Both raise DistNetworkError as Channel does, and kTimeout when the peer takes nothing for too long.
  void post(std::span<const std::uint8_t> request, Deadline deadline);
  void send(std::span<const std::uint8_t> request, Deadline deadline);

  // For reading, and for what is set up before the first write.
  net::Channel& channel() { return channel_; }

 private:
  void check();
  void await_thread(Deadline deadline) LOCKSTEP_REQUIRES(mutex_);
  void gather(std::span<const std::uint8_t> request, Deadline deadline);
  void write_gathered();

  net::Channel channel_;
  const base::MadeHere made_here_;
  base::Mutex mutex_;
  base::ConditionVariable something_;  // for the thread
  base::ConditionVariable sent_;       // for post and send
  Bytes gathered_ LOCKSTEP_GUARDED_BY(mutex_);
  // The channel's sending half belongs to the thread.
  bool sending_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool stop_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  Deadline deadline_ LOCKSTEP_GUARDED_BY(mutex_) = Deadline::never();  // of what is gathered
  std::optional<Failure> failure_ LOCKSTEP_GUARDED_BY(mutex_);

  int in_a_row_ = 0;                      // the caller's
  Bytes batch_;                           // the thread's
  std::unique_ptr<base::Thread> thread_;  // once needed
};

}  // namespace lockstep::internal
