// Parses integers from text such as environment variables. Thread safety: any thread.
#pragma once

#include <charconv>
#include <string_view>
#include <system_error>
#include <utility>

namespace lockstep::base {

// Parses text of the form "1:2:3", separated by `between`, into `numbers`. False when the text has any other
// form or a number overflows its type; `numbers` may have been modified then.
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
