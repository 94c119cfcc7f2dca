// Workers of a user who may not send descriptors for a while: they meet later.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/fork_testing.h"
#include "lockstep/net/unix_socket.h"
#include "lockstep/transport/transport_contract.h"
#include "lockstep/transport/worker_transport.h"
#include "lockstep/transport/worker_transport_testing.h"

namespace lockstep::transport {
namespace {

using fork_testing::Children;
using fork_testing::eventually;
using worker_testing::send;

// Descriptors that were sent and not yet received. The kernel admits as many per user as a process may have
// open.
class DescriptorsOnTheirWay {
 public:
  void fill() {
    const std::vector<int> numbers(8, 0);
    try {
      for (;; ++n_messages_) ends_.first.send(to_bytes("x"), Deadline::now(), numbers);
    } catch (const Error& error) {
      CHILD_EXPECT(error.kind() == ErrorKind::kTimeout, error.what());
    }
  }
  void drain() {
    for (Bytes buffer(16); n_messages_ > 0; --n_messages_) ends_.second.receive(buffer, patience());
  }

 private:
  std::pair<net::UnixSocket, net::UnixSocket> ends_ = net::UnixSocket::pair();
  int n_messages_ = 0;
};

// In a child, as root: the kernel counts descriptors in flight per user, and root's without a limit.
void become_user_with_few_descriptors() {
  const rlimit few{.rlim_cur = 64, .rlim_max = 64};
  CHILD_EXPECT(::setrlimit(RLIMIT_NOFILE, &few) == 0, errno);
  CHILD_EXPECT(::setresgid(65532, 65532, 65532) == 0 && ::setresuid(65532, 65532, 65532) == 0, errno);
}

TEST(WorkerTransportProcesses, MeetAsSoonAsTheUserMaySendDescriptorsAgain) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become a user with few";
  Children children;
  children.start([] {
    become_user_with_few_descriptors();
    const auto a = open_worker_transport({.id = 0, .name = "worker0"});
    const auto b = open_worker_transport({.id = 1, .name = "worker1"});
    const auto poll_both = [&] {
      for (int i = 0; i < 2000; ++i) {
        for (Transport* one : {a.get(), b.get()}) {
          const auto event = one->poll();
          CHILD_EXPECT(!event, event->cause);
        }
      }
    };
    DescriptorsOnTheirWay others;
    others.fill();
    a->add_peer(1, "worker1", b->address());
    send(*a, 1, message_of(3, 10));
    poll_both();  // the introduction of the first does not get through
    others.drain();
    poll_both();
    others.fill();
    b->add_peer(0, "worker0", a->address());
    poll_both();  // nor the welcome of the second
    others.drain();
    std::optional<Event> event;
    CHILD_EXPECT(eventually([&] {
                   CHILD_EXPECT(!a->poll(), "lost");
                   event = b->poll();
                   return event.has_value();
                 }),
                 "nothing came");
    CHILD_EXPECT(event->what == Event::What::kMessage && is_message(event->message, 3, 10), event->cause);
  });
  EXPECT_EQ(children.status(0), 0);
}

// While TCP connections are polled, sockets do not wake a thread that sleeps: what a poller leaves to be tried
// again must.
TEST(WorkerTransportProcesses, AThreadThatSleptBeforeTheyMightNotSendDescriptorsTriesAgain) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become a user with few";
  Children children;
  children.start([] {
    become_user_with_few_descriptors();
    const auto a = open_worker_transport({.id = 0, .name = "worker0", .bind_host = "127.0.0.1"});
    const auto b = open_worker_transport({.id = 1, .name = "worker1"});
    const auto c = open_worker_transport({.id = 2, .name = "worker2", .route = Route::kTcp});
    a->add_peer(1, "worker1", b->address());
    b->add_peer(0, "worker0", a->address());
    a->add_peer(2, "worker2", c->address());
    c->add_peer(0, "worker0", a->address());
    send(*c, 0, message_of(3, 10));
    CHILD_EXPECT(eventually([&] { return c->poll(), a->poll().has_value(); }), "no TCP connection");
    a->begin_polling();
    std::atomic<bool> over{false};
    std::thread sleeper([&] {
      for (; !over; a->poll()) a->wait(Deadline::after(std::chrono::hours(1)));
    });
    std::this_thread::sleep_for(Milliseconds(100));
    DescriptorsOnTheirWay others;
    others.fill();
    send(*a, 1, message_of(4, 10));
    for (int i = 0; i < 2000; ++i) CHILD_EXPECT(!a->poll() && !b->poll(), "an event");
    a->end_polling();
    others.drain();
    std::optional<Event> event;
    CHILD_EXPECT(eventually([&] { return (event = b->poll()).has_value(); }), "nobody tried again");
    CHILD_EXPECT(is_message(event->message, 4, 10), event->cause);
    over = true;
    a->wake();
    sleeper.join();
  });
  EXPECT_EQ(children.status(0), 0);
}

}  // namespace
}  // namespace lockstep::transport
