// Carries messages between the workers of one job, and reports when one of them is lost.
//
// A transport has no threads of its own: any idle thread polls it for what has arrived, and one thread may
// block in wait() until there is something. So a caller that waits for its answer fetches it itself, without
// waking a second thread, and a handler runs on the thread that found its message.
//
// Delivery: at most once; in order from one worker to another, as they are polled. After a worker was
// reported lost, none of its messages is polled (threads that poll concurrently must decide which of their
// polls was first).
// Implementations: WorkerTransport (shared memory on one host, TCP across), InProcessTransport (workers as
// threads of one process, for tests).
// Thread safety: every method may be called from any thread, wait() by one at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/transport/message.h"

namespace lockstep::transport {

struct Event {
  enum class What : std::uint8_t { kMessage, kLost };
  What what = What::kMessage;
  WorkerId from = 0;
  Message message{};    // kMessage
  std::string cause{};  // kLost: "killed by SIGKILL (9)", "its connection ended"
};

class Transport {
 public:
  virtual ~Transport() = default;

  // How others reach this worker: to be published, and passed to their add_peer.
  virtual Bytes address() const = 0;
  // From now on messages can be sent to, and are accepted from, worker `id`. Does not block: the first
  // message establishes the connection. Raises kUsage for an address that cannot be read, and for an id that
  // exists.
  virtual void add_peer(WorkerId id, const std::string& name, const Bytes& address) = 0;
  // The worker has left in an orderly way: its end is not reported as a loss, and sending to it fails from
  // now on. Its messages that arrived before are still polled.
  virtual void remove_peer(WorkerId id) = 0;

  // Sends, or queues what does not fit at once, also while a connection is being established. A transport
  // that must block does so until `deadline` at most; the implementations here never block. A failure
  // (kPeerLost, kTimeout, kUsage for an unknown worker or a message beyond the limit, kResource) means that
  // the message will not arrive; success does not mean that it will. A worker may send to itself.
  virtual std::optional<Failure> send(WorkerId to, Message message, Deadline deadline) = 0;

  // The next message or loss, in no particular order between workers. Never blocks.
  virtual std::optional<Event> poll() = 0;
  // Returns when poll() may have something, when wake() was called since the last wait, or at the deadline.
  virtual void wait(Deadline until) = 0;
  virtual void wake() noexcept = 0;
  // Between the two calls some thread polls continuously: senders need not wake this worker.
  virtual void begin_polling() noexcept = 0;
  virtual void end_polling() noexcept = 0;

  // Sends what is queued, until the deadline, then closes every connection. Peers see that as a loss unless
  // they have called remove_peer before. Afterwards nothing is polled and sends fail.
  virtual void close(Deadline deadline) = 0;
};

}  // namespace lockstep::transport
