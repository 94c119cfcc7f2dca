#include "lockstep/transport/in_process_transport.h"

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::transport {
namespace {

constexpr const char* kEnded = "its connection ended";

}  // namespace

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(std::shared_ptr<InProcessExchange> exchange, WorkerId id)
      : exchange_(std::move(exchange)), id_(id) {}
  ~InProcessTransport() override { exchange_->end(id_, kEnded, InProcessExchange::Unread::kArrives); }

  Bytes address() const override { return to_bytes(base::cat("local:", id_)); }
  void add_peer(WorkerId id, const std::string& name, const Bytes& address) override {
    if (as_text(address) != base::cat("local:", id)) {
      base::raise(ErrorKind::kUsage,
                  base::cat("worker ", name, " has an address that is not of this process"));
    }
    // Perhaps with the number of one that left.
    const base::MutexLock lock(exchange_->mutex_);
    exchange_->apart_.erase({id_, id});
  }
  void remove_peer(WorkerId id) override {
    const base::MutexLock lock(exchange_->mutex_);
    exchange_->apart_.insert({id_, id});
  }
  std::optional<Failure> send(WorkerId to, Message message, Deadline) override {
    return exchange_->send(id_, to, std::move(message));
  }
  std::optional<Event> poll() override { return exchange_->poll(id_); }
  void wait(Deadline until) override {
    const base::MutexLock lock(exchange_->mutex_);
    const auto box = exchange_->boxes_.find(id_);
    if (box == exchange_->boxes_.end()) return;
    const auto mine = box->second;
    mine->bell.wait_until(exchange_->mutex_, until.time_point(),
                          [&] { return mine->ringing || mine->gone || !mine->events.empty(); });
    mine->ringing = false;
  }
  void wake() noexcept override {
    const base::MutexLock lock(exchange_->mutex_);
    const auto box = exchange_->boxes_.find(id_);
    if (box == exchange_->boxes_.end()) return;
    box->second->ringing = true;
    box->second->bell.notify_all();
  }
  void begin_polling() noexcept override {}
  void end_polling() noexcept override {}
  void close(Deadline) override { exchange_->end(id_, kEnded, InProcessExchange::Unread::kArrives); }

 private:
  const std::shared_ptr<InProcessExchange> exchange_;
  const WorkerId id_;
};

std::shared_ptr<InProcessExchange> InProcessExchange::create(InProcessOptions options) {
  return std::shared_ptr<InProcessExchange>(new InProcessExchange(std::move(options)));
}

std::unique_ptr<Transport> InProcessExchange::join(WorkerId id) {
  const base::MutexLock lock(mutex_);
  if (!boxes_.try_emplace(id, std::make_shared<Box>()).second)
    base::raise(ErrorKind::kUsage, base::cat("worker ", id, " exists already"));
  std::erase_if(apart_, [&](const auto& pair) { return pair.first == id || pair.second == id; });
  return std::make_unique<InProcessTransport>(shared_from_this(), id);
}

std::optional<Failure> InProcessExchange::send(WorkerId from, WorkerId to, Message message) {
  const bool lost = options_.lose && options_.lose(from, to, message);
  const base::MutexLock lock(mutex_);
  const auto box = boxes_.find(to);
  if (box == boxes_.end() || !boxes_.contains(from) || apart_.contains({from, to})) {
    return Failure{.kind = ErrorKind::kPeerLost,
                   .message = base::cat("worker ", to, " is gone"),
                   .family = ErrorFamily::kNetwork,
                   .peer = LostPeer{.rank = to, .cause = "gone"}};
  }
  if (lost) return std::nullopt;
  // As if it had travelled: the receiver's own bytes.
  const auto copy = [](object::Blob& blob) {
    blob = owned_blob(Bytes(blob.bytes.begin(), blob.bytes.end()));
  };
  copy(message.body);
  std::ranges::for_each(message.blobs, copy);
  box->second->events.push_back({.from = from, .message = std::move(message)});
  box->second->bell.notify_all();
  return std::nullopt;
}

// With a seed, any event may come next: schedules that a network could produce, and more. Only a loss stays
// behind the messages of the worker that was lost, which every transport guarantees.
std::optional<Event> InProcessExchange::poll(WorkerId id) {
  const base::MutexLock lock(mutex_);
  const auto box = boxes_.find(id);
  if (box == boxes_.end() || box->second->events.empty()) return std::nullopt;
  auto& events = box->second->events;
  std::size_t at = 0;
  if (options_.seed != 0) {
    if (options_.hold_back > random_() % 1024) return std::nullopt;
    at = random_() % events.size();
    // A loss comes after what was sent before it.
    if (events[at].what == Event::What::kLost) {
      const auto first = std::ranges::find(events, events[at].from, &Event::from);
      at = static_cast<std::size_t>(first - events.begin());
    }
  }
  Event event = std::move(events[at]);
  events.erase(events.begin() + static_cast<std::ptrdiff_t>(at));
  return event;
}

void InProcessExchange::kill(WorkerId id, const std::string& cause) {
  end(id, cause, Unread::kIsLost);
}

void InProcessExchange::end(WorkerId id, const std::string& cause, Unread unread) {
  const base::MutexLock lock(mutex_);
  const auto box = boxes_.find(id);
  if (box == boxes_.end()) return;
  box->second->gone = true;
  box->second->bell.notify_all();
  boxes_.erase(box);
  tell_loss(id, cause, unread);
}

// Pre: mutex_ is held. apart_ makes the report happen once per pair, also when a worker is removed and then
// ends.
void InProcessExchange::tell_loss(WorkerId id, const std::string& cause, Unread unread) {
  for (auto& [other, box] : boxes_) {
    if (!apart_.insert({other, id}).second) continue;
    if (unread == Unread::kIsLost)
      std::erase_if(box->events, [&](const Event& event) { return event.from == id; });
    box->events.push_back({.what = Event::What::kLost, .from = id, .cause = cause});
    box->bell.notify_all();
  }
}

}  // namespace lockstep::transport
