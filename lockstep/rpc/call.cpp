#include "lockstep/rpc/call.h"

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/rpc/detail/rref_scope.h"

namespace lockstep::rpc {
namespace {

// Of this thread only: futures of calls that callbacks make elsewhere are not collected.
thread_local WaitAll* wait_all_here = nullptr;

[[noreturn]] void damaged() {
  base::raise(ErrorKind::kUsage, "this is not a call: the message is damaged");
}

// The calling thread runs a function for a caller while it lives.
class Running {
 public:
  Running(std::uint64_t context, std::shared_ptr<internal::ProfileLog> profile)
      : before_(this_call()), log_before_(internal::profile_here()) {
    this_call() = {.autograd_context = context};
    internal::profile_here() = std::move(profile);
  }
  ~Running() {
    this_call() = before_;
    internal::profile_here() = log_before_;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  const CallScope before_;
  const std::shared_ptr<internal::ProfileLog> log_before_;
};

}  // namespace

namespace internal {

// A call on the wire (docs/rpc-protocol.md). Lengths come first, so that a receiver that only needs the list
// of RRefs reads the head and skips the rest; the object is what remains, and its blobs travel beside the
// body:
// context u64, flags u8, length of the name u16, of the extension_bytes u32, of the list of RRefs u32, name,
// extension_bytes, list, object.
Payload encode_call(const OutgoingCall& call) {
  // The scope registers a fork for every RRef that encode() meets. If anything below throws, its destructor
  // releases them; once guard() has been called the message does.
  const auto context = this_call().autograd_context;
  SendScope scope(*call.agent, call.to.id);
  const DeviceRoute route(*call.agent, call.to.id, Leg::kRequest);
  object::DeviceTransit transit{.targets = &route};
  Payload payload;
  Bytes extension_bytes;
  Bytes object;
  const auto encode = [&] {
    object::Encoder encoder(&payload.blobs, &transit);
    call.encode(encoder);
    object = encoder.take();
  };
  if (auto* extension = context == 0 ? nullptr : call.agent->extension()) {
    extension_bytes = extension->encode(context, call.to.id, encode);
  } else {
    encode();
  }
  base::ByteWriter writer;
  writer.put(context)
      .put(profile_here() ? kProfiled : std::uint8_t{0})
      .put(static_cast<std::uint16_t>(call.function.size()))
      .put(static_cast<std::uint32_t>(extension_bytes.size()))
      .put(static_cast<std::uint32_t>(scope.count() * kRRefOnWireBytes))
      .raw({reinterpret_cast<const std::uint8_t*>(call.function.data()), call.function.size()})
      .raw(extension_bytes)
      .raw(scope.list())
      .raw(object);
  payload.body = writer.take();
  payload.guard = scope.guard();
  payload.copies = std::move(transit.copies);
  return payload;
}

// Input from another worker: every length is checked before it is used. The spans point into `body`, which
// must outlive the head.
CallHead read_call_head(std::span<const std::uint8_t> body) {
  base::ByteReader reader(body);
  CallHead head;
  const auto context = reader.get<std::uint64_t>();
  const auto flags = reader.get<std::uint8_t>();
  const auto n_name = reader.get<std::uint16_t>();
  const auto n_extension_bytes = reader.get<std::uint32_t>();
  const auto n_rrefs = reader.get<std::uint32_t>();
  if (!context || !flags || !n_name || !n_extension_bytes || !n_rrefs) damaged();
  const auto name = reader.raw(*n_name);
  const auto extension_bytes = reader.raw(*n_extension_bytes);
  const auto rrefs = reader.raw(*n_rrefs);
  if (!name || !extension_bytes || !rrefs) damaged();
  head.context = *context;
  head.flags = *flags;
  head.function = as_text(*name);
  head.extension_bytes = *extension_bytes;
  head.rrefs = *rrefs;
  head.object = body.subspan(reader.position());
  return head;
}

CallHead read_value_head(std::span<const std::uint8_t> body) {
  base::ByteReader reader(body);
  const auto n_extension_bytes = reader.get<std::uint32_t>();
  const auto n_events = reader.get<std::uint32_t>();
  const auto n_rrefs = reader.get<std::uint32_t>();
  const auto extension_bytes =
      n_extension_bytes && n_events && n_rrefs ? reader.raw(*n_extension_bytes) : std::nullopt;
  const auto events = extension_bytes ? reader.raw(*n_events) : std::nullopt;
  const auto rrefs = events ? reader.raw(*n_rrefs) : std::nullopt;
  if (!rrefs) base::raise(ErrorKind::kUsage, "this is not an answer: the message is damaged");
  return {.extension_bytes = *extension_bytes,
          .events = *events,
          .rrefs = *rrefs,
          .object = body.subspan(reader.position())};
}

// An answer on the wire:
// length of the extension_bytes u32, of the events u32, of the list of RRefs u32, extension_bytes, events,
// list, object.
Payload encode_value(Agent& agent, std::uint64_t context, WorkerId to,
                     const std::function<void(object::Encoder&)>& encode, const ProfileLog* profile) {
  SendScope scope(agent, to);
  const DeviceRoute route(agent, to, Leg::kAnswer);
  object::DeviceTransit transit{.targets = &route};
  Payload payload;
  Bytes extension_bytes;
  Bytes object;
  const auto write = [&] {
    object::Encoder encoder(&payload.blobs, &transit);
    encode(encoder);
    object = encoder.take();
  };
  if (auto* extension = context == 0 ? nullptr : agent.extension()) {
    extension_bytes = extension->encode(context, to, write);
  } else {
    write();
  }
  base::ByteWriter writer;
  // After the object was written, since encoding a result may itself be recorded.
  const Bytes events = profile == nullptr ? Bytes{} : lockstep::encode(profile->events());
  writer.put(static_cast<std::uint32_t>(extension_bytes.size()))
      .put(static_cast<std::uint32_t>(events.size()))
      .put(static_cast<std::uint32_t>(scope.count() * kRRefOnWireBytes))
      .raw(extension_bytes)
      .raw(events)
      .raw(scope.list())
      .raw(object);
  payload.body = writer.take();
  payload.guard = scope.guard();
  payload.copies = std::move(transit.copies);
  return payload;
}

namespace {

// An object that arrived, and what came with it.
struct Arrived {
  std::uint64_t context;
  WorkerId from;
  Leg leg;
  const CallHead& head;
  const object::Blobs& blobs;
};

void decode_object(Agent& agent, const Arrived& arrived, object::DeviceTransit& transit,
                   const std::function<void(object::Decoder&)>& decode) {
  const auto extension_bytes = arrived.head.extension_bytes;
  const auto read = [&] {
    object::Decoder decoder(arrived.head.object, arrived.blobs, &transit);
    decode(decoder);
    decoder.finish();
  };
  // Empty outside a context, and where no tensor among the arguments requires a gradient.
  if (extension_bytes.empty()) {
    read();
    return;
  }
  auto* extension = agent.extension();
  if (extension == nullptr) {
    base::raise(
        ErrorKind::kUnsupported,
        "a call arrived with an autograd context, and this program has no distributed autograd: include "
        "lockstep/autograd/autograd.h (or lockstep/lockstep.h)");
  }
  extension->decode(arrived.context, arrived.from, arrived.leg, extension_bytes, read);
}

}  // namespace

// The RRefs of the answer are received even if decoding fails: their forks exist at this worker from the
// moment of arrival.
void decode_value(Agent& agent, std::uint64_t context, WorkerId from, const Agent::Answer& answer,
                  object::DeviceTransit& transit, const std::function<void(object::Decoder&)>& decode) {
  const CallHead head = read_value_head(answer.body.bytes);
  const ReceiveScope scope(agent, from, head.rrefs);
  decode_object(agent,
                {.context = context, .from = from, .leg = Leg::kAnswer, .head = head, .blobs = answer.blobs},
                transit, decode);
}

// `done` is called once, here or later from another thread when the function returns a future. The RRefs of
// the message are received before anything else, so that a call that fails to decode returns its forks all
// the same; the scope ends before the function runs: what that decodes belongs to other messages.
void run_call(Agent& agent, WorkerId from, const CallHead& head, const object::Blobs& blobs, CallDone done,
              const std::shared_ptr<ProfileLog>& profile) {
  try {
    // The function runs with the streams of its arguments current, and its result is encoded or kept in them.
    object::DeviceTransit transit;
    std::optional<ReceiveScope> scope(std::in_place, agent, from, head.rrefs);
    const auto& entry = find_function(std::string(head.function));
    std::shared_ptr<void> arguments;
    try {
      decode_object(
          agent, {.context = head.context, .from = from, .leg = Leg::kRequest, .head = head, .blobs = blobs},
          transit, [&](object::Decoder& decoder) { arguments = entry.decode(decoder); });
    } catch (const Error& error) {
      Failure failure = error.failure();
      failure.message =
          base::cat("arguments of ", entry.name, ", which is ", entry.signature, ": ", failure.message);
      base::raise(std::move(failure));
    }
    scope.reset();
    // Only around run(): what a future's callback does later runs without the context, on whatever thread
    // ends it.
    const Running running(head.context, profile);
    entry.run(arguments.get(), [&entry, done](std::shared_ptr<void> result, const CallFailure* failure) {
      done(entry.result, std::move(result), failure);
    });
  } catch (...) {
    const CallFailure failure = current_call_failure();
    done(nullptr, nullptr, &failure);
  }
}

namespace {

// A function that is recorded, for its caller or for a ServerProfile.
struct Served {
  std::shared_ptr<ProfileLog> log;  // null: only for a ServerProfile
  std::string function;
  std::string caller;
  std::string worker;
  std::int64_t start_ns;

  // Null, and no clock is read, unless somebody asked.
  static std::shared_ptr<Served> start(Agent& agent, WorkerId from, const CallHead& head) {
    const bool asked = (head.flags & kProfiled) != 0;
    if (!asked && !profiling_server()) return nullptr;
    return std::make_shared<Served>(Served{.log = asked ? std::make_shared<ProfileLog>() : nullptr,
                                           .function = std::string(head.function),
                                           .caller = agent.info(from).name,
                                           .worker = agent.self().name,
                                           .start_ns = Deadline::now().monotonic_ns()});
  }
  void end() const {
    ProfileEvent event{.name = function,
                       .worker = worker,
                       .start_ns = start_ns,
                       .duration_ns = Deadline::now().monotonic_ns() - start_ns};
    if (log) log->add(event);
    event.name = call_name("rpc", function, caller, worker);
    profile_served(event);
  }
};

}  // namespace

void serve_call(Request request) {
  CallHead head;
  try {
    // Points into the request, which `shared` below keeps alive until the function has returned.
    head = read_call_head(request.body());
  } catch (...) {
    request.answer_failure(current_call_failure());
    return;
  }
  // Shared with the callback, which answers it, perhaps long after this function has returned.
  auto shared = std::make_shared<Request>(std::move(request));
  const auto served = Served::start(shared->agent(), shared->from(), head);
  run_call(
      shared->agent(), shared->from(), head, shared->blobs(),
      [shared, served, context = head.context](const ValueType* type, const std::shared_ptr<void>& result,
                                               const CallFailure* failure) {
        if (served) served->end();
        if (failure != nullptr) {
          shared->answer_failure(*failure);
          return;
        }
        try {
          if (type->encode == nullptr) {
            base::raise(ErrorKind::kUsage,
                        base::cat("a result of type ", type->name(), " cannot be sent; use remote()"));
          }
          shared->answer(encode_value(
              shared->agent(), context, shared->from(),
              [&](object::Encoder& encoder) { type->encode(encoder, result.get()); },
              served ? served->log.get() : nullptr));
        } catch (...) {
          shared->answer_failure(current_call_failure());
        }
      },
      served ? served->log : nullptr);
}

std::string describe_call(const OutgoingCall& call) {
  std::string text = call.to.name;
  return text.append("'s function ").append(call.function);
}

namespace {

// What the callee recorded.
std::vector<ProfileEvent> read_events(std::span<const std::uint8_t> body) {
  if (body.empty()) return {};
  const auto events = read_value_head(body).events;
  if (events.empty()) return {};
  return decode<std::vector<ProfileEvent>>(events);
}

}  // namespace

// `next` is called in every case: a log that cannot be read must not keep a future from ending.
Agent::OnAnswer profiled(const OutgoingCall& call, Agent::OnAnswer next) {
  if (!profile_here()) return next;
  const auto& self = call.agent->self();
  ProfileEvent event{.name = call_name(call.mode, call.function, self.name, call.to.name),
                     .worker = self.name,
                     .start_ns = Deadline::now().monotonic_ns()};
  return [log = profile_here(), event = std::move(event), next = std::move(next)](
             Agent::Answer* answer, const CallFailure* failure) mutable {
    try {
      event.duration_ns = Deadline::now().monotonic_ns() - event.start_ns;
      log->add(event);
      if (answer != nullptr) log->add_all(event.name + "#remote_op: ", read_events(answer->body.bytes));
    } catch (...) {
      lockstep::base::log(LogLevel::kWarn,
                          "the events of a profiled call cannot be read: " + base::current_failure().message);
    }
    next(answer, failure);
  };
}

void send_call(const OutgoingCall& call, Agent::OnAnswer on_answer, const FutureBase* future) {
  if (call.function.size() > 0xFFFF) base::raise(ErrorKind::kUsage, "the name of a function is too long");
  auto payload = encode_call(call);
  call.agent->request(call.to.id, MessageKind::kCall, std::move(payload), call.timeout, describe_call(call),
                      profiled(call, std::move(on_answer)), future);
}

void note_future(std::shared_ptr<FutureBase> future) {
  if (wait_all_here != nullptr) wait_all_here->futures_.push_back(std::move(future));
}

}  // namespace internal

WaitAll::WaitAll() {
  if (wait_all_here != nullptr) base::raise(ErrorKind::kUsage, "a WaitAll is open in this thread already");
  wait_all_here = this;
}

// Does not throw what failed: it may run while another exception unwinds.
WaitAll::~WaitAll() {
  wait_all_here = nullptr;
  for (const auto& future : futures_) {
    future->wait_over(Deadline::never());
    if (const auto* failure = future->failure()) {
      base::log(LogLevel::kError, "a call that nobody waited for failed: " + failure->failure.message);
    }
  }
}

// First all are waited for, then the first failure is raised: no call is left in progress when the caller
// unwinds.
void WaitAll::wait() {
  const auto futures = std::exchange(futures_, {});
  for (const auto& future : futures) future->wait_over(Deadline::never());
  for (const auto& future : futures) {
    if (const auto* failure = future->failure()) failure->raise();
  }
}

}  // namespace lockstep::rpc
