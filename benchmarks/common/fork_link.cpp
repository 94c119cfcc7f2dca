#include "benchmarks/common/fork_link.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>
#include <vector>

namespace bench {
namespace {

// Each message is one datagram of a SOCK_SEQPACKET pair: boundaries are kept, and a peer's death reads as its
// end.
class ForkLink final : public Link {
 public:
  ForkLink(int rank, int size, std::vector<int> sockets, std::vector<pid_t> children)
      : rank_(rank), size_(size), sockets_(std::move(sockets)), children_(std::move(children)) {}
  // Rank 0 waits for the others, so that their processor time counts as this contender's.
  ~ForkLink() override {
    for (const int socket : sockets_) ::close(socket);
    for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::string share(const std::string& words) override {
    if (rank_ != 0) return receive(sockets_.front());
    for (const int socket : sockets_) send(socket, words);
    return words;
  }

  bool all(bool mine) override {
    if (rank_ != 0) {
      send(sockets_.front(), mine ? "1" : "0");
      return mine;
    }
    bool every = mine;
    for (const int socket : sockets_) every = (receive(socket) == "1") && every;
    return every;
  }

 private:
  static void send(int socket, const std::string& words) {
    if (::send(socket, words.data(), words.size(), MSG_NOSIGNAL) < 0) {
      throw std::runtime_error("another rank of this contender is gone");
    }
  }
  static std::string receive(int socket) {
    char words[1024];
    const ssize_t n = ::recv(socket, words, sizeof(words), 0);
    if (n <= 0) throw std::runtime_error("another rank of this contender is gone");
    return {words, static_cast<std::size_t>(n)};
  }

  const int rank_;
  const int size_;
  const std::vector<int> sockets_;  // on rank 0 one per other rank; else the one to rank 0
  const std::vector<pid_t> children_;
};

}  // namespace

std::unique_ptr<Link> fork_ranks(int n) {
  std::vector<int> to_others;
  std::vector<pid_t> children;
  for (int rank = 1; rank < n; ++rank) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
      throw std::runtime_error("no socket pair for the ranks");
    }
    const pid_t parent = ::getpid();
    const pid_t child = ::fork();
    if (child < 0) throw std::runtime_error("no process for a rank");
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      ::close(pair[0]);
      for (const int socket : to_others) ::close(socket);
      const int nothing = ::open("/dev/null", O_RDONLY);
      ::dup2(nothing, STDIN_FILENO);
      ::close(nothing);
      return std::make_unique<ForkLink>(rank, n, std::vector<int>{pair[1]}, std::vector<pid_t>{});
    }
    ::close(pair[1]);
    to_others.push_back(pair[0]);
    children.push_back(child);
  }
  return std::make_unique<ForkLink>(0, n, std::move(to_others), std::move(children));
}

int n_cores() {
  cpu_set_t allowed;
  return ::sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
}

void bind_to_core(int rank) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  int skip = rank % CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || skip-- != 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    ::sched_setaffinity(0, sizeof(one), &one);
    return;
  }
}

}  // namespace bench
