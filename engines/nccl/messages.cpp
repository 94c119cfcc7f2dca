#include "engines/nccl/messages.h"

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {

using base::cat;

// NCCL matches messages of a pair in the order in which both sides issue them, and knows no tags. So nothing is issued
// before both sides agree on the order, which the receiver decides:
//
//   sender                                   receiver
//   add: sent_[to], kAnnounce  ---------->   announced_[from]
//                                            match: the first receive that fits takes it
//   take_records: issue        <----------   kGo with its sequence; issues its side
//
// All of it on the thread ls-nccl, hence no locks. Records of one pair arrive in the order sent (peers.h).
void Messages::add(std::vector<OperationPtr> posted) {
  for (OperationPtr& each : posted) {
    const lockstep_op& op = each->op;
    if (op.kind == LOCKSTEP_RECV) {
      receives_.push_back(std::move(each));
      continue;
    }
    const auto to = static_cast<std::size_t>(op.root);
    const Record record{.kind = Record::kAnnounce,
                        .tag = op.tag,
                        .dtype = static_cast<std::uint32_t>(op.dtype),
                        .reserved = 0,
                        .count = op.count,
                        .sequence = ++next_[to]};
    each->sequence = record.sequence;
    each->peer = op.root;
    if (op.root == peers_.rank()) {
      announced_[to].push_back({record, ++arrivals_, std::move(each)});
    } else {
      sent_[to].emplace(record.sequence, std::move(each));
      peers_.send(op.root, record);
    }
  }
}

bool Messages::wants(int from) const {
  if (!sent_[static_cast<std::size_t>(from)].empty()) return true;
  return std::ranges::any_of(
      receives_, [&](const OperationPtr& each) { return each->op.root == from || each->op.root < 0; });
}

std::vector<OperationPtr> Messages::step(bool slow) {
  std::vector<OperationPtr> issue;
  for (int from = 0; from < peers_.size(); ++from) {
    if (from != peers_.rank() && (peers_.is_local(from) || (slow && wants(from)))) take_records(from, issue);
  }
  match(issue);
  peers_.flush();
  return issue;
}

void Messages::take_records(int from, std::vector<OperationPtr>& issue) {
  const auto at = static_cast<std::size_t>(from);
  for (const Record& record : peers_.receive(from)) {
    if (record.kind == Record::kAnnounce) {
      announced_[at].push_back({record, ++arrivals_, nullptr});
    } else if (const auto found = sent_[at].find(record.sequence); found != sent_[at].end()) {
      issue.push_back(std::move(found->second));
      sent_[at].erase(found);
    }
  }
}

// Of several senders, for a receive from anyone, the one whose announcement came first.
int Messages::sender_for(const Operation& receive, std::deque<Announced>::iterator& at) {
  const int wanted = receive.op.root;
  int sender = -1;
  for (int from = 0; from < peers_.size(); ++from) {
    if (wanted >= 0 ? from != wanted : from == peers_.rank()) continue;
    auto& all = announced_[static_cast<std::size_t>(from)];
    const auto found =
        std::ranges::find_if(all, [&](const Announced& each) { return each.record.tag == receive.op.tag; });
    if (found == all.end() || (sender >= 0 && found->arrival > at->arrival)) continue;
    sender = from;
    at = found;
  }
  return sender;
}

// Receives in the order posted: an earlier one of equal sender and tag takes the earlier message.
void Messages::match(std::vector<OperationPtr>& issue) {
  for (auto receive = receives_.begin(); receive != receives_.end();) {
    std::deque<Announced>::iterator at;
    const int from = sender_for(**receive, at);
    if (from < 0) {
      ++receive;
      continue;
    }
    take(*receive, from, *at, issue);
    announced_[static_cast<std::size_t>(from)].erase(at);
    receive = receives_.erase(receive);
  }
}

// What differs is raised before either side has issued anything: the group breaks, no buffer is overrun.
void Messages::take(const OperationPtr& receive, int from, const Announced& message,
                    std::vector<OperationPtr>& issue) {
  const lockstep_op& op = receive->op;
  const Record& record = message.record;
  if (record.count != op.count || record.dtype != static_cast<std::uint32_t>(op.dtype)) {
    base::raise(ErrorKind::kUsage,
                cat("rank ", peers_.rank(), " called ", text_of(*receive), ", but rank ", from, " called ",
                    text_of_message(true, static_cast<int>(record.dtype), record.count, record.tag)),
                ErrorFamily::kBackend);
  }
  receive->peer = from;
  receive->sequence = record.sequence;
  if (op.source != nullptr) *op.source = from;
  if (message.own) {
    receive->partner = message.own;
    issue.push_back(message.own);
  } else {
    peers_.send(from, {.kind = Record::kGo, .tag = record.tag, .sequence = record.sequence});
  }
  issue.push_back(receive);
}

bool Messages::waiting() const {
  const auto& own = announced_[static_cast<std::size_t>(peers_.rank())];
  return !receives_.empty() || !own.empty() ||
         std::ranges::any_of(sent_, [](const auto& each) { return !each.empty(); });
}

// A send to, or a receive from, ranks that have all left: nobody will answer it. A rank may still answer itself.
std::optional<Failure> Messages::unanswerable() const {
  const auto gone = [&](int rank, const Operation& operation) {
    return Failure{.kind = ErrorKind::kPeerLost,
                   .message = cat("rank ", peers_.rank(), " is in ", text_of(operation), ", but ",
                                  peers_.who(rank), " has left the group"),
                   .family = ErrorFamily::kBackend,
                   .peer = LostPeer{.rank = rank, .pid = peers_.pid(rank), .cause = "left the group"}};
  };
  for (int to = 0; to < peers_.size(); ++to) {
    const auto& sent = sent_[static_cast<std::size_t>(to)];
    if (!sent.empty() && peers_.left(to)) return gone(to, *sent.begin()->second);
  }
  for (const OperationPtr& each : receives_) {
    int last = -1;
    bool all = true;
    for (int from = 0; from < peers_.size(); ++from) {
      if (each->op.root >= 0 ? from != each->op.root : from == peers_.rank()) continue;
      if (from == peers_.rank()) return std::nullopt;
      all = all && peers_.left(from).has_value();
      last = from;
    }
    if (all && last >= 0) return gone(last, *each);
  }
  return std::nullopt;
}

void Messages::clear() {
  for (auto& each : sent_) each.clear();
  for (auto& each : announced_) each.clear();
  receives_.clear();
}

}  // namespace lockstep::nccl_plugin
