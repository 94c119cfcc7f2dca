// Values there and back, the errors of readers that expect something else, and bytes nobody wrote.
#include "lockstep/object/object.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>

#include "lockstep/base/error.h"

namespace app {

enum class Colour : std::uint16_t { kRed = 7, kBlue = 40000 };

struct Point {
  int x = 0;
  double y = 0;
  friend bool operator==(const Point&, const Point&) = default;
};
auto lockstep_fields(lockstep::SelfOf<Point> auto& self) {
  return std::tie(self.x, self.y);
}

struct Layer {
  std::string name;
  std::vector<float> weights;
  std::optional<Colour> colour;
  friend bool operator==(const Layer&, const Layer&) = default;
};
auto lockstep_fields(lockstep::SelfOf<Layer> auto& self) {
  return lockstep::fields({.name = "app.Layer", .version = 2, .members = "name, weights, colour"}, self.name,
                          self.weights, self.colour);
}

struct OldLayer : Layer {};
auto lockstep_fields(lockstep::SelfOf<OldLayer> auto& self) {
  return lockstep::fields({.name = "app.Layer", .version = 1}, self.name, self.weights, self.colour);
}

class Model {
 public:
  Model() = default;
  explicit Model(std::vector<Layer> layers) : layers_(std::move(layers)) {}
  friend bool operator==(const Model&, const Model&) = default;

 private:
  friend auto lockstep_fields(lockstep::SelfOf<Model> auto& self) {
    return lockstep::fields({.name = "app.Model", .members = "layers origin"}, self.layers_, self.origin_);
  }
  std::vector<Layer> layers_;
  Point origin_{1, 2};
};

struct Chain {
  std::unique_ptr<Chain> next;
};
auto lockstep_fields(lockstep::SelfOf<Chain> auto& self) {
  return std::tie(self.next);
}

}  // namespace app

namespace lockstep {
namespace {

template <class T>
void expect_back(const T& value) {
  EXPECT_EQ(decode<T>(encode(value)), value) << object::Codec<T>::name();
}

// The words of the kUsage error that `fn` raises.
std::string refusal(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
    return error.what();
  }
  return "nothing was raised";
}
template <class T>
std::string refusal_of(std::span<const std::uint8_t> bytes) {
  return refusal([&] { decode<T>(bytes); });
}

template <class T>
void expect_limits_back() {
  for (const T value : {std::numeric_limits<T>::lowest(), T{0}, T{1}, std::numeric_limits<T>::max()}) {
    expect_back(value);
  }
}

TEST(Object, BringsEveryNumberBack) {
  expect_limits_back<std::int8_t>();
  expect_limits_back<std::uint8_t>();
  expect_limits_back<std::int16_t>();
  expect_limits_back<std::uint16_t>();
  expect_limits_back<int>();
  expect_limits_back<unsigned>();
  expect_limits_back<long>();
  expect_limits_back<unsigned long long>();
  expect_limits_back<float>();
  expect_limits_back<double>();
  expect_limits_back<char>();
  expect_back(true);
  expect_back(false);
  expect_back(std::complex<float>(1, -2));
  expect_back(std::complex<double>(-0.5, 3));
  expect_back(app::Colour::kBlue);
  EXPECT_EQ(decode<long long>(encode(7L)), 7) << "by size and sign, not by name";
  EXPECT_EQ(decode<std::uint16_t>(encode(app::Colour::kRed)), 7) << "an enum is the integer below it";
}

TEST(Object, BringsContainersBack) {
  expect_back(std::string("with \0 inside", 13));
  expect_back(Bytes{0, 255, 3});
  expect_back(std::vector<int>{});
  expect_back(std::vector<double>{1, 2, 3});
  expect_back(std::vector<bool>{true, false, true});
  expect_back(std::vector<app::Colour>{app::Colour::kRed, app::Colour::kBlue});
  expect_back(std::vector<std::vector<std::string>>{{"a", "b"}, {}, {"c"}});
  expect_back(std::deque<short>{1, -1});
  expect_back(std::list<std::string>{"x", ""});
  expect_back(std::array<float, 3>{1, 2, 3});
  expect_back(std::array<std::string, 2>{"p", "q"});
  expect_back(std::set<int>{3, 1, 2});
  expect_back(std::unordered_set<std::string>{"one", "two"});
  expect_back(std::map<std::string, std::vector<int>>{{"k", {1}}, {"l", {}}});
  expect_back(std::unordered_map<int, std::string>{{1, "one"}, {2, "two"}});
  expect_back(std::pair<int, std::string>{1, "one"});
  expect_back(std::tuple<int, std::string, bool>{1, "one", true});
  expect_back(std::tuple<>{});
  EXPECT_EQ(decode<std::deque<int>>(encode(std::vector<int>{1, 2})), (std::deque<int>{1, 2}))
      << "sequences are one type";
}

TEST(Object, BringsOptionalsVariantsAndPointersBack) {
  expect_back(std::optional<int>{});
  expect_back(std::optional<int>{4});
  expect_back(std::optional<std::optional<int>>{std::optional<int>{}});
  using Either = std::variant<std::monostate, int, std::string, std::vector<app::Point>>;
  expect_back(Either{});
  expect_back(Either{"text"});
  expect_back(Either{std::vector<app::Point>{{1, 2}}});
  EXPECT_EQ(decode<std::shared_ptr<int>>(encode(std::shared_ptr<int>())), nullptr);
  EXPECT_EQ(*decode<std::shared_ptr<std::string>>(encode(std::make_unique<std::string>("held"))), "held");
}

TEST(Object, BringsStructsBackThroughTheirListOfMembers) {
  expect_back(app::Point{3, 0.5});
  expect_back(app::Layer{"conv", {1, 2}, app::Colour::kRed});
  expect_back(app::Model({{"a", {}, {}}, {"b", {3}, app::Colour::kBlue}}));
  app::Chain chain{std::make_unique<app::Chain>()};
  EXPECT_EQ(decode<app::Chain>(encode(chain)).next->next, nullptr);
}

TEST(Object, SaysWhatWasExpectedWhatCameAndWhere) {
  EXPECT_EQ(refusal_of<int>(encode(1.5)), "at the top: expected i32, got f64");
  EXPECT_EQ(refusal_of<std::string>(encode(std::vector<int>{1})),
            "at the top: expected text, got list of i32");
  EXPECT_EQ(refusal_of<Bytes>(encode(std::vector<int>{1})), "at the top: expected bytes, got list of i32");
  EXPECT_EQ(refusal_of<std::vector<int>>(encode(Bytes{1})),
            "at the top: expected list of i32, got list of u8");
  EXPECT_EQ(refusal_of<int>(encode(app::Layer{})),
            "at the top: expected i32, got struct app.Layer version 2 of 3 fields");

  using Maps = std::vector<std::map<std::string, std::tuple<int, std::optional<int>>>>;
  using Sent = std::vector<std::map<std::string, std::tuple<int, std::optional<bool>>>>;
  EXPECT_EQ(refusal_of<Maps>(encode(Sent{{}, {{"k", {1, true}}}})), "at [1][0]<1>: expected i32, got bool");
  EXPECT_EQ((refusal_of<std::map<int, int>>(encode(std::map<long, int>{{1, 2}}))),
            "at [key 0]: expected i32, got i64");
  EXPECT_EQ((refusal_of<std::array<int, 3>>(encode(std::vector<int>{1, 2}))),
            "at the top: expected list of i32 of length 3, got 2 elements");
  EXPECT_EQ((refusal_of<std::pair<int, int>>(encode(std::tuple<int>{1}))),
            "at the top: expected tuple of 2 (i32, i32), got tuple of 1");
  EXPECT_EQ((refusal_of<std::variant<int>>(encode(std::variant<int, bool>{true}))),
            "at the top: expected variant (i32), got alternative 1, which it does not have");
}

TEST(Object, NamesTheMemberOfAStruct) {
  using Wrong = std::tuple<std::string, std::vector<double>, std::optional<app::Colour>>;
  Bytes bytes = encode(app::Model({{}, {"b", {3}, {}}}));
  // The second layer's weights: the second code of a packed f32 list becomes f64's.
  int seen = 0;
  for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
    if (bytes[i] == 0x11 && bytes[i + 1] == 0x0A && ++seen == 2) bytes[i + 1] = 0x0B;
  }
  ASSERT_EQ(seen, 2);
  EXPECT_EQ(refusal_of<app::Model>(bytes), "at .layers[1].weights: expected list of f32, got list of f64");
  EXPECT_EQ(refusal_of<Wrong>(encode(app::Point{})),
            "at the top: expected tuple of 3 (text, list of f64, optional u16), got struct of 2 fields");
}

TEST(Object, RefusesAnotherNameOrVersionOfAStruct) {
  EXPECT_EQ(refusal_of<app::OldLayer>(encode(app::Layer{})),
            "at the top: expected struct app.Layer version 1 of 3 fields, got struct app.Layer version 2 of "
            "3 fields");
  EXPECT_EQ(refusal_of<app::Point>(encode(app::Chain{})),
            "at the top: expected struct of 2 fields, got struct of 1 fields");
}

TEST(Object, HoldsAValueOfAnyType) {
  const std::vector<Object> list = {Object(3), Object("three"), Object(), Object(app::Layer{"l", {1}, {}}),
                                    Object(std::vector<Object>{Object(1.5), Object(std::string("in"))})};
  const auto back = decode<std::vector<Object>>(encode(list));
  EXPECT_EQ(back, list);
  EXPECT_EQ(back[0].as<int>(), 3);
  EXPECT_EQ(back[1].as<std::string>(), "three");
  EXPECT_TRUE(back[2].empty());
  EXPECT_EQ(back[2].as<std::optional<int>>(), std::nullopt);
  EXPECT_EQ(back[3].as<app::Layer>(), (app::Layer{"l", {1}, {}}));
  EXPECT_EQ(back[4].as<std::vector<Object>>()[0].as<double>(), 1.5);
  EXPECT_EQ(back[0].type(), "i32");
  EXPECT_EQ(back[2].type(), "nothing");
  EXPECT_EQ(refusal([&] { back[1].as<int>(); }), "at the top: expected i32, got text");
  EXPECT_EQ(decode<int>(encode(Object(7))), 7) << "an Object adds nothing to what it holds";
}

TEST(Object, BoundsDepthOnBothSides) {
  app::Chain chain;
  app::Chain* last = &chain;
  // A link is two levels: the member and what the pointer holds.
  for (int i = 0; i < object::kMaxDepth / 2 - 1; ++i)
    last = (last->next = std::make_unique<app::Chain>()).get();
  const auto deepest = encode(chain);
  decode<app::Chain>(deepest);
  last = (last->next = std::make_unique<app::Chain>()).get();
  EXPECT_NE(refusal([&] { encode(chain); }).find("nested more than 128 levels"), std::string::npos);

  Bytes nested = encode(std::monostate());
  nested.pop_back();
  nested.insert(nested.end(), 1'000'000, 0x15);  // optionals in optionals, never a value
  EXPECT_NE(refusal_of<Object>(nested).find("nested more than 128 levels"), std::string::npos);
}

TEST(Object, ComparesEveryLengthWithTheBytesThatAreThere) {
  const auto huge = [](auto value) {
    Bytes bytes = encode(value);
    const std::uint64_t n = std::numeric_limits<std::uint64_t>::max() / 4;
    for (std::size_t at = 9; at + sizeof n <= bytes.size() && at < 11; ++at) {
      Bytes damaged = bytes;
      std::memcpy(damaged.data() + at, &n, sizeof n);
      EXPECT_THROW(decode<decltype(value)>(damaged), Error);
      EXPECT_THROW(decode<Object>(damaged), Error);
    }
  };
  huge(std::string("text"));
  huge(std::vector<double>{1, 2});
  huge(std::vector<std::string>{"a"});
  huge(std::map<int, int>{{1, 2}});
}

TEST(Object, RefusesWhatIsNotOneWholeObject) {
  EXPECT_NE(refusal_of<int>({}).find("not an encoded object"), std::string::npos);
  Bytes bytes = encode(5);
  bytes.push_back(0);
  EXPECT_EQ(refusal_of<int>(bytes), "1 bytes follow the object; it is damaged");
  bytes = encode(5);
  bytes[3] = 9;
  EXPECT_NE(refusal_of<int>(bytes).find("format version 9, this program reads version 1"), std::string::npos);
  bytes = encode(5);
  bytes[4] = 1;
  EXPECT_NE(refusal_of<int>(bytes).find("1 blobs beside it, 0 came"), std::string::npos);
  bytes = encode(true);
  bytes.back() = 2;
  EXPECT_EQ(refusal_of<bool>(bytes), "at the top: a bool is 0 or 1, not 2");
  bytes = encode(std::vector<bool>{true});
  bytes.back() = 2;
  EXPECT_NE(refusal_of<std::vector<bool>>(bytes).find("0 or 1, not 2"), std::string::npos);
  bytes = encode(std::monostate());
  bytes.back() = 0x77;
  EXPECT_EQ(refusal_of<Object>(bytes), "at the top: expected a value, got unknown type code 119");
}

TEST(Object, RefusesASetOrMapThatHoldsAKeyTwice) {
  EXPECT_EQ(refusal_of<std::set<int>>(encode(std::vector<int>{1, 1})),
            "at the top: a set has an element twice");
  Bytes bytes = encode(std::map<bool, bool>{{false, true}, {true, true}});
  bytes[bytes.size() - 3] = 0;
  EXPECT_EQ((refusal_of<std::map<bool, bool>>(bytes)), "at [1]: a map has a key twice");
}

// Everything at once, for bytes nobody wrote.
using Everything =
    std::tuple<app::Model, std::map<std::string, std::vector<app::Point>>, std::set<int>, std::vector<bool>,
               std::variant<std::monostate, std::string, double>, std::optional<std::complex<float>>,
               std::deque<std::string>, std::array<int, 2>, std::vector<Object>>;

Everything everything() {
  return {app::Model({{"conv", {1, 2, 3}, app::Colour::kRed}, {"", {}, {}}}),
          {{"a", {{1, 2}, {3, 4}}}, {"b", {}}},
          {5, 6},
          {true, false},
          "held",
          std::complex<float>(1, 2),
          {"d", "e"},
          {7, 8},
          {Object(1), Object("two"), Object(), Object(std::map<int, std::string>{{1, "x"}})}};
}

// Either an error of ours, or a value that goes there and back.
void expect_refused_or_whole(const Bytes& bytes) {
  try {
    const auto value = decode<Everything>(bytes);
    const auto again = encode(value);
    EXPECT_EQ(encode(decode<Everything>(again)), again);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
  }
  try {
    decode<Object>(bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
  }
}

TEST(ObjectDamage, EveryByteChangedAndEveryLengthCutIsRefusedOrWhole) {
  const Bytes whole = encode(everything());
  EXPECT_EQ(decode<Everything>(whole), everything());
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_THROW(decode<Everything>(std::span(whole).first(n)), Error) << n << " bytes of " << whole.size();
  }
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const std::uint8_t change : {0x01, 0x02, 0x04, 0x10, 0x80, 0xFF}) {
      Bytes bytes = whole;
      bytes[at] ^= change;
      expect_refused_or_whole(bytes);
    }
  }
}

TEST(ObjectDamage, RandomCutsAndSplicesAreRefusedOrWhole) {
  const Bytes whole = encode(everything());
  std::mt19937 random(20260101);
  const auto below = [&](std::size_t n) { return static_cast<std::ptrdiff_t>(random() % n); };
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes = whole;
    for (int edit = static_cast<int>(below(4)); edit >= 0; --edit) {
      if (bytes.size() < 12) break;
      const auto at = below(bytes.size() - 8) + 8;
      const auto n = std::min<std::ptrdiff_t>(below(16), static_cast<std::ptrdiff_t>(bytes.size()) - at);
      switch (below(4)) {
        case 0:
          bytes.erase(bytes.begin() + at, bytes.begin() + at + n);
          break;
        case 1:
          bytes.insert(bytes.begin() + at, whole.begin() + at % 64, whole.begin() + at % 64 + n);
          break;
        case 2:
          bytes[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(random());
          break;
        default:
          bytes[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(random() % 0x19);
      }
    }
    expect_refused_or_whole(bytes);
  }
}

}  // namespace
}  // namespace lockstep
