// Whole numbers in text that the environment hands down.
#pragma once

#include <charconv>
#include <string_view>
#include <system_error>
#include <utility>

namespace lockstep::base {

// Reads one number into each of `numbers` from text of the form "1:2:3", with `between` between them. False when the text is
// anything else, a number too large for its type included; `numbers` may have been changed then.
template <class... Number>
bool read_numbers(std::string_view text, char between, Number&... numbers) {
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto read = [&](bool first, auto& number) {
    if (!first && (at == end || *at++ != between)) return false;
    const auto [stop, error] = std::from_chars(at, end, number);
    at = stop;
    return error == std::errc();
  };
  bool first = true;
  return (read(std::exchange(first, false), numbers) && ...) && at == end;
}

}  // namespace lockstep::base
