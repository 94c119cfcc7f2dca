// Random bytes as an object: refused with an error of ours, or a value that goes there and back. The first
// byte picks the type that is read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "lockstep/base/error.h"
#include "lockstep/object/object.h"

namespace fuzzed {

struct Node {
  std::string name;
  std::vector<double> values;
  std::map<int, std::vector<bool>> flags;
  std::vector<Node> children;
  std::shared_ptr<Node> next;
};
auto lockstep_fields(lockstep::SelfOf<Node> auto& self) {
  return lockstep::fields({.name = "Node", .version = 1, .members = "name values flags children next"},
                          self.name, self.values, self.flags, self.children, self.next);
}

using Mixed = std::vector<std::variant<std::monostate, std::string, std::set<long>, std::complex<double>,
                                       std::tuple<int, float, std::optional<lockstep::Object>>,
                                       std::deque<std::string>, std::array<short, 3>>>;

template <class T>
void try_as(std::span<const std::uint8_t> bytes) {
  try {
    const auto once = lockstep::encode(lockstep::decode<T>(bytes));
    if (lockstep::encode(lockstep::decode<T>(once)) != once) std::abort();
  } catch (const lockstep::Error& error) {
    if (error.kind() != lockstep::ErrorKind::kUsage) std::abort();
  }
}

}  // namespace fuzzed

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  // The header is given, so that every input reaches the values.
  lockstep::Bytes bytes = {'L', 'S', 'O', 1, 0, 0, 0, 0};
  bytes.insert(bytes.end(), data + 1, data + size);
  switch (data[0] % 4) {
    case 0:
      fuzzed::try_as<fuzzed::Node>(bytes);
      break;
    case 1:
      fuzzed::try_as<fuzzed::Mixed>(bytes);
      break;
    case 2:
      fuzzed::try_as<lockstep::Object>(bytes);
      break;
    default:
      fuzzed::try_as<fuzzed::Node>(std::span(data + 1, size - 1));
  }
  return 0;
}
