#include "lockstep/store/internal/checks.h"

#include <algorithm>
#include <charconv>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {
namespace {

// Values are arbitrary bytes: show few of them, and only what a terminal survives.
std::string printable(std::span<const std::uint8_t> value) {
  constexpr std::size_t kShown = 32;
  std::string text = to_text(value.first(std::min(value.size(), kShown)));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
  return value.size() > kShown ? text + "..." : text;
}

}  // namespace

std::string join_keys(std::span<const std::string> keys) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (const auto& key : keys.first(std::min(keys.size(), kShown))) {
    if (!text.empty()) text += ", ";
    text += key;
  }
  if (keys.size() > kShown) text += base::cat(" and ", keys.size() - kShown, " more");
  return text;
}

void raise_wait_timeout(std::string_view store, Milliseconds timeout, std::span<const std::string> keys) {
  base::raise(ErrorKind::kTimeout,
              base::cat(store, ": wait timeout after ", timeout.count(), " ms, keys: ", join_keys(keys)),
              ErrorFamily::kStore);
}

std::string waiting_text(std::string_view store, std::span<const std::string> keys) {
  return base::cat("this process waits in ", store, " until another one sets ",
                   keys.size() == 1 ? "key " : "keys ", join_keys(keys));
}

void raise_is_queue(std::string_view store, const std::string& key) {
  base::raise(ErrorKind::kUsage, base::cat(store, ": key ", key, " is a queue: read it with queue_pop"),
              ErrorFamily::kStore);
}

std::int64_t add_to_counter(const std::string& key, std::span<const std::uint8_t> value,
                            std::int64_t amount) {
  const std::string_view text = as_text(value);
  std::int64_t before = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), before);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) {
    base::raise(
        ErrorKind::kUsage,
        base::cat("add: the value of key ", key, " is not a decimal integer: \"", printable(value), "\""),
        ErrorFamily::kStore);
  }
  std::int64_t after = 0;
  if (__builtin_add_overflow(before, amount, &after)) {
    base::raise(ErrorKind::kUsage, base::cat("add: key ", key, " would overflow: ", before, " + ", amount),
                ErrorFamily::kStore);
  }
  return after;
}

void check_pairs(std::size_t n_keys, std::size_t n_values) {
  if (n_keys == n_values) return;
  base::raise(ErrorKind::kUsage, base::cat("multi_set: ", n_keys, " keys but ", n_values, " values"),
              ErrorFamily::kStore);
}

}  // namespace lockstep::internal
