#include "lockstep/remote/remote_device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  base::raise(ErrorKind::kUsage,
              base::cat("\"", text, "\" is not a remote device: ", why,
                        "; write \"worker/device\", \"rank:2/device\", a worker's name or a device"));
}

// The constructor is libtorch's only parser, and it throws.
std::optional<c10::Device> as_device(std::string_view text) {
  try {
    return c10::Device(std::string(text));
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == ':' ||
         c == '-';
}

// The rules for names are those of rpc::start (check_name in rpc.cpp): text that passes here can be a
// worker's name. A name that begins with "rank:" cannot be written; the worker is addressed by its number
// then.
rpc::Worker as_worker(std::string_view text, std::string_view whole) {
  constexpr std::string_view kRank = "rank:";
  if (text.empty()) refuse(whole, "it names no worker");
  if (!text.starts_with(kRank)) {
    if (!std::ranges::all_of(text, is_name_character) || text.size() >= 128) {
      refuse(whole, "a worker's name is of letters, digits, '_', ':' and '-', and shorter than 128");
    }
    return std::string(text);
  }
  const auto digits = text.substr(kRank.size());
  int rank = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc() || end != digits.data() + digits.size() || rank < 0) {
    refuse(whole, "after \"rank:\" comes a number");
  }
  return rank;
}

}  // namespace

RemoteDevice RemoteDevice::parse(std::string_view text) {
  const auto slash = text.find('/');
  if (slash == std::string_view::npos) {
    if (text.empty()) refuse(text, "it is empty");
    // The device first: "cuda:0" would also be a valid name of a worker.
    if (const auto device = as_device(text)) return {std::nullopt, *device};
    return {as_worker(text, text), c10::Device(c10::kCPU)};
  }
  const auto worker = as_worker(text.substr(0, slash), text);
  const auto device = as_device(text.substr(slash + 1));
  if (!device) refuse(text, base::cat("\"", text.substr(slash + 1), "\" is not a device"));
  return {worker, *device};
}

std::string RemoteDevice::text() const {
  if (!worker_) return device_.str();
  const auto& target = worker_->target();
  if (const auto* name = std::get_if<std::string>(&target)) return base::cat(*name, "/", device_.str());
  return base::cat("rank:", std::get<int>(target), "/", device_.str());
}

}  // namespace lockstep
