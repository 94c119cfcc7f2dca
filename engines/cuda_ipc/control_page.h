// The control page (layout.h) as one process sees it: its words, their addresses on the device, the first failure, and which
// streams may still touch it.
//
// A stream may hold writes and waits for words of the page long after an operation is over for its rank, behind other work.
// So every stream that was given such work is marked by an event after it, and the page stays registered until all events
// have been reached: retire().
// Thread safety: every method may be called from any thread.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "engines/cuda/resources.h"
#include "engines/cuda_ipc/layout.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/error.h"
#include "lockstep/local/segment_table.h"

namespace lockstep::cuda_ipc {

class ControlPage {
 public:
  // Pre: the segment has page_bytes(size) bytes.
  ControlPage(local::Mapping segment, int size) : segment_(std::move(segment)), size_(size) {}

  ControlHeader& header() { return *reinterpret_cast<ControlHeader*>(segment_->data()); }
  RankState& rank(int r) { return header().ranks[r]; }
  Word& done(std::uint64_t k) { return flags()[k % kWindow]; }
  Word& ready(int r, std::uint64_t k) { return flags_of(r)[k % kWindow]; }
  Word& message_ready(int r, std::size_t slot) { return flags_of(r)[kWindow + slot]; }
  Word& message_done(int r, std::size_t slot) { return flags_of(r)[kWindow + kMessages + slot]; }
  Word& submitted(std::uint64_t k) { return header().submitted[k % kWindow]; }
  Word& launching(std::uint64_t k) { return header().launching[k % kWindow]; }
  Call& call(int r, std::uint64_t k);
  Message& message(int r, std::size_t slot);

  // The number in a word that failure may have marked: a word says which operation it stands for also when it is released.
  static std::uint64_t number_in(const Word& word) {
    return word.load(std::memory_order_acquire) & (kReleased - 1);
  }
  // Stores `number` from the host and keeps the mark.
  static void put_number(Word& word, std::uint64_t number);

  // Registers the page for a device's streams, once per process and mapping; any device may then use it. Raises
  // cuda::Error. Pre of what follows.
  void attach(const cuda::PrimaryContext& context);
  // Enqueue a write, or a wait for `number` or more, in a stream of `context`. Pre: the context is current.
  void enqueue_write(const cuda::PrimaryContext& context, cuda::Stream stream, Word& word,
                     std::uint64_t number);
  void enqueue_wait(const cuda::PrimaryContext& context, cuda::Stream stream, Word& word,
                    std::uint64_t number);
  // The same write in a stream of the engine, which is never retired before its work is done.
  void enqueue_own_write(cuda::Stream stream, Word& word, std::uint64_t number);

  // ---- failure ----

  // Records the failure unless another came first, and lets every waiting stream go on.
  void break_with(const Failure& failure);
  bool broken() { return header().broken.load(std::memory_order_acquire) != 0; }
  // The first failure, or nothing. Waits for at most 50 ms for a rank that is writing it.
  std::optional<Failure> failure();

  // Takes the page over when its communicator is destroyed; unregistered and unmapped by a later call of this, when no
  // stream can touch it any more.
  static void retire(std::shared_ptr<ControlPage> page);

 private:
  struct Registration;
  Word* flags() { return reinterpret_cast<Word*>(segment_->data() + kFlagsAt); }
  Word* flags_of(int r) {
    return flags() + kWindow + static_cast<std::size_t>(r) * (kWindow + 2 * kMessages);
  }
  void release_waits();
  void mark(const cuda::PrimaryContext& context, cuda::Stream stream);
  bool untouched();

  const local::Mapping segment_;
  const int size_;
  base::Mutex mutex_;
  std::shared_ptr<Registration> registration_ LOCKSTEP_GUARDED_BY(mutex_);
  // By device and stream: the default stream of each is null.
  std::map<std::pair<int, cuda::Stream>, cuda::OwnedEvent> marks_ LOCKSTEP_GUARDED_BY(mutex_);
  std::atomic<Registration*> attached_{nullptr};  // registration_, for paths without the lock
};

}  // namespace lockstep::cuda_ipc
