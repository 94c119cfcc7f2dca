// The requests of a session: what each reads and changes in the data that all sessions share, and its reply.
#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/store/internal/checks.h"
#include "lockstep/store/internal/tcp_session.h"

namespace lockstep::internal {

namespace {

// A key as its user wrote it.
std::string shown(std::string_view key) {
  return std::string(key.starts_with(kKeyPrefix) ? key.substr(kKeyPrefix.size()) : key);
}

}  // namespace

template <class T>
void TcpSession::put(T value) {
  const auto* at = reinterpret_cast<const std::uint8_t*>(&value);
  output_.insert(output_.end(), at, at + sizeof value);
}

void TcpSession::put_sized(std::span<const std::uint8_t> bytes) {
  put<std::uint64_t>(bytes.size());
  output_.insert(output_.end(), bytes.begin(), bytes.end());
}

void TcpSession::refuse(std::string_view why) {
  put(Status::kRefused);
  put_sized({reinterpret_cast<const std::uint8_t*>(why.data()), why.size()});
}

bool TcpSession::reply_fits(std::uint64_t n_bytes) {
  if (n_bytes <= kInputKept) return true;
  if (n_bytes > shared_.limits.reply_bytes) return fail("the reply is longer than the limit");
  if (n_bytes > shared_.unsent.left())
    return fail("too many replies are pending for clients that do not read");
  return true;
}

bool TcpSession::stored(bool fits) {
  return fits || fail("the store's quota is used up");
}

// A torch client that was woken for a queue's entry does not take it after all.
void TcpSession::pass_on_entries() {
  if (woken_for_.empty()) return;
  for (const std::string& key : std::exchange(woken_for_, {})) shared_.data.pass_on(key);
}

bool TcpSession::execute() {
  TcpData& data = shared_.data;
  const Query query = parser_.query();
  // torch's pop is two requests, wait and then pop. A client that was woken for an entry and then asks for
  // something else does not want it: the entry goes to the next waiter, which would otherwise sleep beside a
  // queue that is not empty.
  if (query == Query::kQueuePop) {
    woken_for_.clear();
  } else {
    pass_on_entries();
  }
  switch (query) {
    case Query::kValidate:
      if (parser_.number() != kValidationMagic) return fail("its magic number is wrong");
      stage_ = Stage::kReady;
      return true;
    case Query::kPing:
      put(pong(static_cast<std::uint32_t>(parser_.number())));
      return true;
    case Query::kSet:
      return stored(data.set(parser_.text(0), parser_.bytes(1)));
    case Query::kAppend:
      return stored(data.append(parser_.text(0), parser_.bytes(1)));
    case Query::kQueuePush:
      return stored(data.push(parser_.text(0), parser_.bytes(1)));
    case Query::kMultiSet:
      return execute_multi_set();
    case Query::kCompareSet:
      return execute_compare_set();
    case Query::kGet:
      return execute_get();
    case Query::kMultiGet:
      return execute_multi_get();
    case Query::kAdd:
      return execute_add(Checked::kNo);
    case Query::kAddChecked:
      return execute_add(Checked::kYes);
    case Query::kCheck:
      put(all_exist() ? CheckReply::kReady : CheckReply::kNotReady);
      return true;
    case Query::kWait:
    case Query::kWaitExist:
    case Query::kGetWait:
    case Query::kQueuePopWait:
      return execute_wait();
    case Query::kCancelWait:
      data.cancel(*this);
      put(WaitReply::kCanceled);
      return true;
    case Query::kNumKeys:
      put(static_cast<std::int64_t>(data.n_keys()));
      return true;
    case Query::kDeleteKey:
      put<std::int64_t>(data.erase(parser_.text(0)) ? 1 : 0);
      return true;
    case Query::kQueuePop:
      return execute_pop();
    case Query::kQueueLen:
      put(data.queue_length(parser_.text(0)));
      return true;
    case Query::kListKeys:
      return execute_list_keys();
    case Query::kLocalName:
      execute_local_name();
      return true;
    case Query::kTorchEnd:
    case Query::kOursEnd:
      break;
  }
  return fail("no such request");
}

bool TcpSession::all_exist() const {
  for (std::size_t i = 0; i < parser_.n_fields(); ++i) {
    if (!shared_.data.exists(parser_.text(i))) return false;
  }
  return true;
}

bool TcpSession::execute_wait() {
  waiting_for_ = parser_.query();
  std::vector<std::string> keys;
  keys.reserve(parser_.n_fields());
  for (std::size_t i = 0; i < parser_.n_fields(); ++i) keys.emplace_back(parser_.text(i));
  // A wait that may take an entry wakes one waiter per entry; a wait for existence wakes all.
  const bool takes = waiting_for_ == Query::kWait || waiting_for_ == Query::kQueuePopWait;
  // ready() runs inside this call when all keys exist already.
  shared_.data.wait(*this, std::move(keys), takes ? Wakes::kOneBy : Wakes::kAll);
  return why_.empty();
}

// Called by TcpData, inside this session's own request or inside another session's write. In the second case
// the owner must be told to send and to go on, but not here, in the middle of the other's request: `woken` is
// worked off afterwards.
void TcpSession::ready() {
  switch (waiting_for_) {
    case Query::kWait:
      put(WaitReply::kStopWaiting);
      woken_for_ = std::move(keys());
      break;
    case Query::kWaitExist:
      put(Status::kDone);
      break;
    case Query::kGetWait:
      reply_values();
      break;
    case Query::kQueuePopWait:
      reply_entry();
      break;
    default:
      fail("no such wait");
  }
  if (!feeding_) shared_.woken.push_back(this);
}

// The values of keys(), all of which exist.
void TcpSession::reply_values() {
  std::uint64_t n_bytes = 0;
  for (const std::string& key : keys()) {
    const auto value = shared_.data.find(key);
    if (!value) return refuse(base::cat("key ", shown(key), " is a queue: read it with queue_pop"));
    n_bytes += value->size() + 8;
  }
  if (!reply_fits(n_bytes)) return;
  put(Status::kDone);
  for (const std::string& key : keys()) put_sized(*shared_.data.find(key));
}

// Taken only when it can be sent: otherwise this connection ends, and the entry is the next waiter's.
void TcpSession::reply_entry() {
  const auto value = shared_.data.front(keys()[0]);
  if (!value) return refuse("the key holds a value, not a queue");
  if (!reply_fits(value->size())) {
    woken_for_ = std::move(keys());
    return;
  }
  put(Status::kDone);
  put_sized(*value);  // before it is taken: without memory for the reply the entry stays
  shared_.data.pop(keys()[0]);
}

bool TcpSession::execute_get() {
  const auto value = shared_.data.find(parser_.text(0));
  // The protocol cannot express "absent": torch's server, too, ends the connection.
  if (!value) return fail("get of a key that does not exist");
  if (!reply_fits(value->size())) return false;
  put_sized(*value);
  return true;
}

bool TcpSession::execute_multi_get() {
  std::uint64_t n_bytes = 0;
  for (std::size_t i = 0; i < parser_.n_fields(); ++i) {
    const auto value = shared_.data.find(parser_.text(i));
    if (!value) return fail("multi_get of a key that does not exist");
    n_bytes += value->size() + 8;
  }
  if (!reply_fits(n_bytes)) return false;
  for (std::size_t i = 0; i < parser_.n_fields(); ++i) put_sized(*shared_.data.find(parser_.text(i)));
  return true;
}

bool TcpSession::execute_multi_set() {
  for (std::size_t i = 0; i + 1 < parser_.n_fields(); i += 2) {
    if (!stored(shared_.data.set(parser_.text(i), parser_.bytes(i + 1)))) return false;
  }
  return true;
}

// torch's rule: an absent key equals an empty expectation; when nothing is written the reply is the current
// value, or the expectation itself when there is none.
bool TcpSession::execute_compare_set() {
  const auto current = shared_.data.find(parser_.text(0));
  const auto expected = parser_.bytes(1);
  const auto desired = parser_.bytes(2);
  if (current && !std::ranges::equal(*current, expected)) {
    if (!reply_fits(current->size())) return false;
    put_sized(*current);
    return true;
  }
  const bool stays_absent = !current && !expected.empty();
  if (!stays_absent && !stored(shared_.data.set(parser_.text(0), desired))) return false;
  put_sized(stays_absent ? expected : desired);
  return true;
}

bool TcpSession::execute_add(Checked checked) {
  const std::string_view key = parser_.text(0);
  std::int64_t after = parser_.number();
  if (const auto current = shared_.data.find(key)) {
    try {
      after = add_to_counter(shown(key), *current, after);
    } catch (const Error& error) {
      // torch's request cannot express this either; ours can.
      if (checked == Checked::kNo) return fail(error.what());
      refuse(error.what());
      return true;
    }
  }
  std::array<char, 24> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), after).ptr;
  const auto n_bytes = static_cast<std::size_t>(end - text.data());
  if (!stored(shared_.data.set(key, {reinterpret_cast<const std::uint8_t*>(text.data()), n_bytes})))
    return false;
  // torch's reply is the number alone; ours has a status in front.
  if (checked == Checked::kYes) put(Status::kDone);
  put(after);
  if (key == kInitKey) shared_.joined(after);
  return true;
}

// As reply_entry().
bool TcpSession::execute_pop() {
  const auto value = shared_.data.front(parser_.text(0));
  if (value && !reply_fits(value->size())) {
    woken_for_.emplace_back(parser_.text(0));
    return false;
  }
  put<std::uint64_t>(value ? 1 : 0);
  if (value) {
    put_sized(*value);
    shared_.data.pop(parser_.text(0));
  }
  return true;
}

void TcpSession::execute_local_name() {
  if (shared_.local_name.empty()) return refuse("no local socket");
  put(Status::kDone);
  for (const std::string* text : {&shared_.local_name, &shared_.host}) {
    put_sized({reinterpret_cast<const std::uint8_t*>(text->data()), text->size()});
  }
}

bool TcpSession::execute_list_keys() {
  // Measured before it is written: a reply that does not fit must not be begun.
  std::uint64_t n_bytes = 8;
  shared_.data.each_key([&](std::string_view key) { n_bytes += 8 + key.size(); });
  if (!reply_fits(n_bytes)) return false;
  put<std::uint64_t>(shared_.data.n_keys());
  shared_.data.each_key([&](std::string_view key) {
    put_sized({reinterpret_cast<const std::uint8_t*>(key.data()), key.size()});
  });
  return true;
}

}  // namespace lockstep::internal
