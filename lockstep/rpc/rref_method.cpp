#include "lockstep/rpc/rref_method.h"

#include "lockstep/rpc/detail/rref_scope.h"

namespace lockstep::rpc::internal {
namespace {

constexpr StructInfo kInfo{.name = "lockstep.rpc.Target", .version = 1};

// Functions that waited run in their caller's scope all the same.
class Resumed {
 public:
  explicit Resumed(const CallScope& scope) : before_(this_call()) { this_call() = scope; }
  ~Resumed() { this_call() = before_; }
  Resumed(const Resumed&) = delete;
  Resumed& operator=(const Resumed&) = delete;

 private:
  const CallScope before_;
};

}  // namespace

// Two numbers: 1 and the place in the list of RRefs, or 0; the RRef.
void write_target(object::Encoder& encoder, const MethodTarget& target) {
  const auto& state = *target.state;
  const std::uint32_t place = state.is_owner() ? SendScope::add(state) + 1 : 0;
  encoder.code(object::Code::kStruct).sized(kInfo.name).put(kInfo.version).put(std::uint32_t{2});
  const object::Encoder::Deeper deeper(encoder);
  object::write(encoder, place);
  object::write(encoder, state.ref.rref);
}

void read_target(object::Decoder& decoder, MethodTarget& target) {
  object::expect_struct(decoder, kInfo, 2);
  const object::Decoder::Step step(decoder, "object");
  const auto place = object::read<std::uint32_t>(decoder);
  const auto rref = object::read<std::uint64_t>(decoder);
  target.manager = ReceiveScope::manager().shared_from_this();
  if (place == 0) {
    target.value = target.manager->value_of(rref);
  } else {
    target.value = ReceiveScope::get(place - 1)->value;
    if (!target.value) decoder.refuse("an RRef of another worker cannot have its method called here");
  }
}

void when_made(const MethodTarget& target, std::function<void()> run, const FunctionEntry::Done& done) {
  if (target.value->over()) {
    run();
    return;
  }
  // `run` holds the target, and the target its value's state: until the value is made.
  target.value->promise.state()->on_over([manager = target.manager, run = std::move(run), done,
                                          scope = this_call()] {
    const auto agent = manager->agent();
    if (!agent) {
      const CallFailure gone{.failure = {.kind = ErrorKind::kAborted, .message = "the RPC agent is gone"}};
      done(nullptr, &gone);
      return;
    }
    agent->run([run, done, scope] {
      const Resumed resumed(scope);
      try {
        run();
      } catch (...) {
        const CallFailure failure = current_call_failure();
        done(nullptr, &failure);
      }
    });
  });
}

}  // namespace lockstep::rpc::internal
