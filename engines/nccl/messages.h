// Which send belongs to which receive. NCCL matches the messages of two ranks in the order in which both issue them and
// knows no tags, so the ranks agree on that order first, through records beside NCCL (peers.h):
//
//   sender                                   receiver
//   post(SEND): announces tag, type, count ->  kept until a RECV wants it
//                                          <-  go: the first RECV posted that fits (sender, tag)
//   ncclSend, in the order of the goes         ncclRecv, in the order of the goes
//
// Equal (sender, tag) match in the order posted; a receive from any source takes what arrived first. A message thus costs
// half a round trip of the records before NCCL begins; only matched ones reach the device, so that a receive that nobody
// sends to occupies no stream.
//
// Thread safety: post() under the communicator's lock, as take_posted(); the rest belongs to its progress thread.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "engines/nccl/operation.h"
#include "engines/nccl/peers.h"

namespace lockstep::nccl_plugin {

class Messages {
 public:
  explicit Messages(Peers& peers)
      : peers_(peers),
        sent_(static_cast<std::size_t>(peers.size())),
        announced_(static_cast<std::size_t>(peers.size())),
        next_(static_cast<std::size_t>(peers.size())) {}

  // New ones, in the order posted.
  void add(std::vector<OperationPtr> posted);
  // Exchanges records and matches. Returns the operations to issue next, in order, with `peer` set; a message of a rank to
  // itself as the send and the receive, one after the other. slow: also what takes requests to the store. Raises kUsage when
  // a receive does not fit its message.
  std::vector<OperationPtr> step(bool slow);
  // Operations that have not been matched.
  bool waiting() const;
  // One of them that waits for a rank that has left: then the group is broken.
  std::optional<Failure> unanswerable() const;
  void clear();

 private:
  struct Announced {
    Record record;
    std::uint64_t arrival;
    OperationPtr own;  // of this rank to itself
  };
  void take_records(int from, std::vector<OperationPtr>& issue);
  bool wants(int from) const;
  void match(std::vector<OperationPtr>& issue);
  // The announced message for the receive: its sender, or -1.
  int sender_for(const Operation& receive, std::deque<Announced>::iterator& at);
  void take(const OperationPtr& receive, int from, const Announced& message,
            std::vector<OperationPtr>& issue);

  Peers& peers_;
  std::vector<std::map<std::uint64_t, OperationPtr>> sent_;  // by receiver: announced, without a go
  std::list<OperationPtr> receives_;                         // in the order posted
  std::vector<std::deque<Announced>> announced_;             // by sender
  std::vector<std::uint64_t> next_;                          // sends to each rank so far
  std::uint64_t arrivals_ = 0;
};

}  // namespace lockstep::nccl_plugin
