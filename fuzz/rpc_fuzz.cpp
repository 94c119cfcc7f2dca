// Random bytes as what one worker may send another: calls, answers, exceptions, and messages of the control
// kinds. The first byte says which. Refused with an error of ours, or handled; never more than that.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "lockstep/base/log.h"
#include "lockstep/rpc/rpc.h"

namespace {

using namespace lockstep;
using namespace lockstep::rpc;
using Input = std::span<const std::uint8_t>;

struct Node {
  std::string name;
  std::vector<Node> children;
  std::optional<double> weight;
};
auto lockstep_fields(SelfOf<Node> auto& self) {
  return fields({.name = "Node", .version = 1}, self.name, self.children, self.weight);
}

int f(int a, const std::string& b) {
  return a + static_cast<int>(b.size());
}
Node g(const Node& node, const std::vector<double>& values) {
  return {.name = node.name, .children = {node}, .weight = values.empty() ? 0 : values[0]};
}
RRef<int> h(const RRef<int>& ref, const std::map<std::string, RRef<std::string>>&) {
  return ref;
}
LOCKSTEP_RPC_FUNCTION(f, "f");
LOCKSTEP_RPC_FUNCTION(g, "g");
LOCKSTEP_RPC_FUNCTION(h, "h");

// Brings one event, and forgets what is sent.
class OneEvent final : public transport::Transport {
 public:
  Bytes address() const override { return {}; }
  void add_peer(WorkerId, const std::string&, const Bytes&) override {}
  void remove_peer(WorkerId) override {}
  std::optional<Failure> send(WorkerId, transport::Message, Deadline) override { return std::nullopt; }
  std::optional<transport::Event> poll() override {
    const std::lock_guard lock(mutex);
    if (!event) over = 1;
    return std::exchange(event, std::nullopt);
  }
  void wait(Deadline until) override {
    std::unique_lock lock(mutex);
    bell.wait_until(lock, until.time_point(), [this] { return ringing; });
    ringing = false;
  }
  void wake() noexcept override {
    const std::lock_guard lock(mutex);
    ringing = true;
    bell.notify_all();
  }
  void begin_polling() noexcept override {}
  void end_polling() noexcept override {}
  void close(Deadline) override {}

  std::mutex mutex;
  std::condition_variable bell;
  bool ringing = false;
  std::optional<transport::Event> event;
  std::atomic<std::uint8_t> over{0};
};

struct Fuzzed {
  Fuzzed() {
    auto one = std::make_unique<OneEvent>();
    transport = one.get();
    agent = Agent::start({.self = {.id = 0, .name = "fuzzed"}, .num_worker_threads = 1}, std::move(one));
    agent->add_worker({.id = 1, .name = "other"}, {});
  }
  ~Fuzzed() { agent->close(Milliseconds(0)); }
  OneEvent* transport = nullptr;
  std::shared_ptr<Agent> agent;
};

transport::Message message(MessageKind kind, Input input) {
  // Some of the bytes beside the body, as tensors are.
  const std::size_t n_blob = input.empty() ? 0 : std::min<std::size_t>(input[0] % 32, input.size() - 1);
  const auto body = input.empty() ? input : input.subspan(1 + n_blob);
  transport::Message result{.kind = static_cast<std::uint8_t>(kind),
                            .id = 7,
                            .body = transport::owned_blob(Bytes(body.begin(), body.end()))};
  if (n_blob > 0) {
    const auto blob = input.subspan(1, n_blob);
    result.blobs.push_back(transport::owned_blob(Bytes(blob.begin(), blob.end())));
  }
  return result;
}

void answer(Agent& agent, Input input) {
  using Value = std::tuple<int, std::string, std::vector<Node>>;
  try {
    const Agent::Answer received{.body = transport::owned_blob(Bytes(input.begin(), input.end()))};
    object::DeviceTransit transit;
    internal::decode_value(agent, 0, 1, received, transit,
                           [](object::Decoder& decoder) { object::read<Value>(decoder); });
  } catch (const Error&) {
  }
}

void control(Fuzzed& worker, Input input) {
  static constexpr MessageKind kKinds[] = {MessageKind::kRRefFork,   MessageKind::kRRefChild,
                                           MessageKind::kRRefDelete, MessageKind::kRRefFetch,
                                           MessageKind::kGather,     MessageKind::kLeave};
  if (input.empty()) return;
  const MessageKind kind = kKinds[input[0] % std::size(kKinds)];
  {
    const std::lock_guard lock(worker.transport->mutex);
    worker.transport->event = transport::Event{.from = 1, .message = message(kind, input.subspan(1))};
    worker.transport->over = 0;
  }
  worker.agent->help(worker.transport->over);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static std::unique_ptr<Fuzzed> worker;
  static int n = 0;
  if (n++ % 50'000 == 0) {  // what control messages leave behind ends with the worker
    set_log_level(LogLevel::kError);
    worker = std::make_unique<Fuzzed>();
  }
  if (size == 0) return 0;
  const Input input(data + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      internal::serve_call(Request(worker->agent, 1, message(MessageKind::kCall, input)));
      break;
    case 1:
      answer(*worker->agent, input);
      break;
    case 2:
      decode_failure({.id = 1, .name = "other"}, input);
      break;
    default:
      control(*worker, input);
  }
  return 0;
}
