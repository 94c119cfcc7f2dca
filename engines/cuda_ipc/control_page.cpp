#include "engines/cuda_ipc/control_page.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/engine/detail/table_calls.h"
#include "lockstep/engine/plugin.h"

namespace lockstep::cuda_ipc {

// Ranks that are threads of one process share a mapping, which CUDA registers once: the registration is shared too.
struct ControlPage::Registration {
  Registration(const cuda::PrimaryContext& where, void* flags, std::size_t n_bytes)
      : context(&where), memory(where, flags, n_bytes) {}
  const cuda::PrimaryContext* context;
  cuda::RegisteredMemory memory;
};

Call& ControlPage::call(int r, std::uint64_t k) {
  const std::size_t index = static_cast<std::size_t>(r) * kWindow + k % kWindow;
  return *reinterpret_cast<Call*>(segment_->data() + calls_at(size_) + index * Call::bytes(size_));
}

Message& ControlPage::message(int r, std::size_t slot) {
  const std::size_t index = static_cast<std::size_t>(r) * kMessages + slot;
  return *reinterpret_cast<Message*>(segment_->data() + messages_at(size_) + index * sizeof(Message));
}

// Keeps the mark of a release: a number that is stored late must not make streams wait again. acq_rel: the number
// announces what was done before it.
void ControlPage::put_number(Word& word, std::uint64_t number) {
  std::uint64_t old = word.load(std::memory_order_relaxed);
  while (!word.compare_exchange_weak(old, (old & kReleased) | number, std::memory_order_acq_rel)) {
  }
}

// Lock order: the page's mutex, then the process's table. attached_ is read without a lock on every operation: release with
// acquire makes the registration visible with the pointer, which never changes again.
void ControlPage::attach(const cuda::PrimaryContext& context) {
  struct Registrations {
    base::Mutex mutex;
    std::map<void*, std::weak_ptr<Registration>> by_address LOCKSTEP_GUARDED_BY(mutex);
  };
  static Registrations* const all = new Registrations;
  if (attached_.load(std::memory_order_acquire) != nullptr) return;
  const base::MutexLock lock(mutex_);
  if (registration_ != nullptr) return;
  const base::MutexLock registering(all->mutex);
  std::weak_ptr<Registration>& entry = all->by_address[flags()];
  registration_ = entry.lock();
  if (registration_ == nullptr) {
    registration_ = std::make_shared<Registration>(context, flags(), flag_bytes(size_));
    entry = registration_;
  }
  attached_.store(registration_.get(), std::memory_order_release);
}

void ControlPage::enqueue_own_write(cuda::Stream stream, Word& word, std::uint64_t number) {
  const Registration& here = *attached_.load(std::memory_order_acquire);
  const cuda::Driver& driver = here.context->driver();
  cuda::check(
      driver,
      driver.stream_write_value64(stream, here.memory.address_of(&word), number, cuda::kWriteValueDefault),
      "cuStreamWriteValue64");
}

void ControlPage::enqueue_write(const cuda::PrimaryContext& context, cuda::Stream stream, Word& word,
                                std::uint64_t number) {
  enqueue_own_write(stream, word, number);
  mark(context, stream);
}

void ControlPage::enqueue_wait(const cuda::PrimaryContext& context, cuda::Stream stream, Word& word,
                               std::uint64_t number) {
  const Registration& here = *attached_.load(std::memory_order_acquire);
  const cuda::Driver& driver = here.context->driver();
  cuda::check(driver,
              driver.stream_wait_value64(stream, here.memory.address_of(&word), number, cuda::kWaitValueGeq),
              "cuStreamWaitValue64");
  mark(context, stream);
}

// One event per stream, recorded again: its last record stands for all that came before.
void ControlPage::mark(const cuda::PrimaryContext& context, cuda::Stream stream) {
  const base::MutexLock lock(mutex_);
  cuda::OwnedEvent& event = marks_[{context.device(), stream}];
  if (!event) event = cuda::create_event(context);
  const cuda::Driver& driver = context.driver();
  cuda::check(driver, driver.event_record(event.get(), stream), "cuEventRecord");
}

bool ControlPage::untouched() {
  const base::MutexLock lock(mutex_);
  if (registration_ == nullptr) return true;
  const cuda::PrimaryContext& context = *registration_->context;
  const cuda::ContextScope scope(context);
  const cuda::RelaxedCaptureScope relaxed(context.driver());
  std::erase_if(marks_, [&](const auto& mark) {
    return context.driver().event_query(mark.second.get()) != cuda::kNotReady;
  });
  return marks_.empty();
}

void ControlPage::retire(std::shared_ptr<ControlPage> page) {
  struct Retired {
    base::Mutex mutex;
    std::vector<std::shared_ptr<ControlPage>> pages LOCKSTEP_GUARDED_BY(mutex);
  };
  static Retired* const retired = new Retired;
  std::vector<std::shared_ptr<ControlPage>> over;  // destroyed without the lock: unregistering may wait
  const base::MutexLock lock(retired->mutex);
  retired->pages.push_back(std::move(page));
  auto& pages = retired->pages;
  const auto rest =
      std::stable_partition(pages.begin(), pages.end(), [](const auto& one) { return !one->untouched(); });
  over.assign(rest, pages.end());
  pages.erase(rest, pages.end());
}

// The winner of the compare-exchange is the only writer, ever.
void ControlPage::break_with(const Failure& failure) {
  FailureRecord& record = header().record;
  std::uint32_t empty = FailureRecord::kEmpty;
  if (record.state.compare_exchange_strong(empty, FailureRecord::kWriting)) {
    record.status = comm::status_of(failure.kind);
    record.peer_rank = failure.peer ? failure.peer->rank.value_or(-1) : -1;
    record.peer_pid = failure.peer ? failure.peer->pid.value_or(-1) : -1;
    comm::put(record.message, sizeof record.message, failure.message);
    comm::put(record.cause, sizeof record.cause, failure.peer ? failure.peer->cause : std::string());
    record.state.store(FailureRecord::kWritten, std::memory_order_release);
  }
  // seq_cst against the leader, which stores `launching` and then loads this.
  header().broken.store(1, std::memory_order_seq_cst);
  release_waits();
}

// The mark is set beside the number, so that the host still tells what had completed.
void ControlPage::release_waits() {
  for (std::uint64_t k = 0; k < kWindow; ++k) done(k).fetch_or(kReleased, std::memory_order_acq_rel);
  for (int r = 0; r < size_; ++r) {
    for (std::size_t slot = 0; slot < kMessages; ++slot)
      message_done(r, slot).fetch_or(kReleased, std::memory_order_acq_rel);
  }
}

std::optional<Failure> ControlPage::failure() {
  FailureRecord& record = header().record;
  if (!broken() && record.state.load(std::memory_order_acquire) == FailureRecord::kEmpty) return std::nullopt;
  // The rank that claimed the record needs microseconds, unless it was killed in between.
  const Deadline patience = Deadline::after(Milliseconds(50));
  while (record.state.load(std::memory_order_acquire) != FailureRecord::kWritten) {
    if (patience.expired())
      return Failure{ErrorKind::kPeerLost, "the group broke, and the rank that recorded the cause is gone",
                     ErrorFamily::kBackend, LostPeer{}};
    ::sched_yield();
  }
  const auto text = [](const char* from, std::size_t capacity) {
    return std::string(from, ::strnlen(from, capacity));
  };
  Failure failure{comm::kind_of(static_cast<lockstep_status>(record.status)),
                  text(record.message, sizeof record.message), ErrorFamily::kBackend, std::nullopt};
  if (record.peer_rank >= 0)
    failure.peer =
        comm::lost_peer(record.peer_rank, record.peer_pid, text(record.cause, sizeof record.cause));
  return failure;
}

}  // namespace lockstep::cuda_ipc
