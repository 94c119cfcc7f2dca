#include "lockstep/rendezvous/internal/nodelist.h"

#include <charconv>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {
namespace {

constexpr std::size_t kMaxHosts = 1 << 16;

// One pass over a list; `whole` is for errors.
class Expander {
 public:
  explicit Expander(std::string_view whole) : whole_(whole) {}

  std::vector<std::string> list() {
    std::vector<std::string> hosts;
    do {
      for (auto& host : item()) append(hosts, std::move(host));
    } while (skip(','));
    if (at_ < whole_.size()) refuse("a bracket has no partner");
    return hosts;
  }

 private:
  std::vector<std::string> item() {
    std::vector<std::string> hosts{""};
    while (at_ < whole_.size() && whole_[at_] != ',' && whole_[at_] != ']') {
      const std::vector<std::string> parts = skip('[') ? ranges() : std::vector{text()};
      std::vector<std::string> longer;
      for (const auto& host : hosts) {
        for (const auto& part : parts) append(longer, host + part);
      }
      hosts = std::move(longer);
    }
    if (hosts.front().empty()) refuse("a host has no name");
    return hosts;
  }

  std::string text() {
    const std::size_t end = std::min(whole_.find_first_of("[],", at_), whole_.size());
    std::string part(whole_.substr(at_, end - at_));
    at_ = end;
    return part;
  }

  std::vector<std::string> ranges() {
    std::vector<std::string> numbers;
    do {
      const std::string low = digits();
      const std::string high = skip('-') ? digits() : low;
      for (unsigned long n = value(low); n <= value(high); ++n) {
        std::string number = std::to_string(n);
        if (number.size() < low.size()) number.insert(0, low.size() - number.size(), '0');
        append(numbers, std::move(number));
      }
      if (value(low) > value(high)) refuse("a range runs backwards");
    } while (skip(','));
    if (!skip(']')) refuse("a bracket has no partner");
    return numbers;
  }

  std::string digits() {
    const std::size_t end = std::min(whole_.find_first_not_of("0123456789", at_), whole_.size());
    std::string number(whole_.substr(at_, end - at_));
    if (number.empty() || number.size() > 9) refuse("a range needs numbers of at most 9 digits");
    at_ = end;
    return number;
  }

  static unsigned long value(const std::string& digits) {
    unsigned long value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return value;
  }

  bool skip(char c) {
    if (at_ >= whole_.size() || whole_[at_] != c) return false;
    ++at_;
    return true;
  }

  void append(std::vector<std::string>& names, std::string name) const {
    if (names.size() >= kMaxHosts) refuse("it names too many hosts");
    names.push_back(std::move(name));
  }

  [[noreturn]] void refuse(const char* why) const {
    base::raise(ErrorKind::kUsage, base::cat("cannot read the list of hosts \"", whole_, "\": ", why));
  }

  const std::string_view whole_;
  std::size_t at_ = 0;
};

}  // namespace

std::vector<std::string> expand_nodelist(std::string_view text) {
  return Expander(text).list();
}

}  // namespace lockstep::internal
