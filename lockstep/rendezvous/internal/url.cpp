#include "lockstep/rendezvous/internal/url.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {
namespace {

[[noreturn]] void refuse(const std::string& url, const std::string& why) {
  base::raise(ErrorKind::kUsage, base::cat("init_method \"", url, "\": ", why));
}

// Cuts the text behind the first of `marks` off `text` and returns it with its mark.
std::string_view cut(std::string_view& text, std::string_view marks) {
  const std::size_t at = std::min(text.find_first_of(marks), text.size());
  const std::string_view tail = text.substr(at);
  text = text.substr(0, at);
  return tail;
}

void parse_query(Url& url, std::string_view text) {
  while (!text.empty()) {
    text.remove_prefix(1);  // '?' or '&'
    const std::string_view rest = cut(text, "&");
    const std::string_view value = cut(text, "=");
    if (!text.empty()) {
      const bool fresh = url.query.emplace(text, value.empty() ? "" : value.substr(1)).second;
      if (!fresh) refuse(url.text, base::cat(text, " is given twice"));
    }
    text = rest;
  }
}

void parse_authority(Url& url, std::string_view text) {
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) refuse(url.text, "the bracket of the address is not closed");
    url.host = text.substr(1, end - 1);
    text.remove_prefix(end + 1);
    if (!text.empty() && text[0] != ':') refuse(url.text, "neither a port nor a path follows the address");
  } else {
    const std::string_view host = text.substr(0, text.find(':'));
    url.host = host;
    text.remove_prefix(host.size());
  }
  if (!text.empty()) url.port = text.substr(1);
}

}  // namespace

std::optional<long> Url::number(const std::string& key, long low, long high) const {
  const auto found = query.find(key);
  if (found == query.end()) return std::nullopt;
  return parse_number(base::cat("init_method \"", text, "\": ", key), found->second, low, high);
}

Url parse_url(const std::string& text) {
  Url url;
  url.text = text;
  const std::size_t mark = text.find("://");
  if (mark == std::string::npos || mark == 0) {
    refuse(text, "is not a URL; use env://, tcp://host:port or file:///path");
  }
  url.scheme = text.substr(0, mark);
  std::string_view rest = std::string_view(text).substr(mark + 3);
  parse_query(url, cut(rest, "?"));
  url.path = cut(rest, "/");
  parse_authority(url, rest);
  return url;
}

long parse_number(const std::string& what, const std::string& text, long low, long high) {
  long value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || stop != end || value < low || value > high) {
    base::raise(ErrorKind::kUsage,
                base::cat(what, " must be a number from ", low, " to ", high, ", but is \"", text, "\""));
  }
  return value;
}

}  // namespace lockstep::internal
