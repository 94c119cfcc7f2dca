#include "lockstep/debug/detail/checker.h"
#include "lockstep/base/detail/timeout.h"

#include <algorithm>
#include <array>
#include <utility>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/stack_trace.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {
namespace {

using Field = std::pair<const char*, std::string Fingerprint::*>;
constexpr std::array<Field, 6> kFields{{{"operation", &Fingerprint::operation},
                                        {"sequence number", &Fingerprint::sequence},
                                        {"number of tensors", &Fingerprint::n_tensors},
                                        {"dtypes", &Fingerprint::dtypes},
                                        {"device types", &Fingerprint::devices},
                                        {"shapes", &Fingerprint::shapes}}};

std::string encode_all(const std::vector<std::string>& texts) {
  base::ByteWriter writer;
  for (const auto& text : texts) writer.sized(text);
  return to_text(writer.view());
}

std::vector<std::string> decode_all(const std::string& text) {
  base::ByteReader reader({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  std::vector<std::string> texts;
  while (const auto one = reader.sized()) texts.push_back(to_text(*one));
  return texts;
}

// What rank 0 publishes: nothing when all ranks run the same, otherwise what each runs.
std::string judge(const std::vector<std::string>& calls) {
  const auto first = Fingerprint::decode(calls.front());
  const bool in_step = std::ranges::all_of(
      calls, [&](const auto& call) { return first.differences(Fingerprint::decode(call)).empty(); });
  return in_step ? "" : encode_all(calls);
}

}  // namespace

std::string Fingerprint::text() const {
  return base::cat(operation, ", sequence number ", sequence, ", ", n_tensors, " tensor(s)",
                   dtypes.empty() ? "" : ", dtypes " + dtypes,
                   devices.empty() ? "" : ", device types " + devices,
                   shapes.empty() ? "" : ", shapes " + shapes);
}

std::string Fingerprint::encode() const {
  std::vector<std::string> fields;
  for (const auto& [name, field] : kFields) fields.push_back(this->*field);
  return encode_all(fields);
}

Fingerprint Fingerprint::decode(const std::string& text) {
  auto fields = decode_all(text);
  fields.resize(kFields.size());
  Fingerprint print;
  for (std::size_t i = 0; i < kFields.size(); ++i) print.*kFields[i].second = std::move(fields[i]);
  return print;
}

std::string Fingerprint::differences(const Fingerprint& other) const {
  std::string found;
  for (const auto& [name, field] : kFields) {
    const bool skipped = field == &Fingerprint::shapes && ((this->*field).empty() || (other.*field).empty());
    if (skipped || this->*field == other.*field) continue;
    found += base::cat(found.empty() ? "" : "; ", name, ": ", this->*field, " vs ", other.*field);
  }
  return found;
}

Checker::Checker(Store& store, int rank, std::vector<int> ranks)
    : rank_(rank), ranks_(std::move(ranks)), gather_(store, rank, ranks_) {}

void Checker::check(const std::string& who, const Fingerprint& mine, Milliseconds timeout,
                    const std::function<void()>& still_worth_it) {
  const base::MutexLock lock(mutex_);
  std::string verdict;
  try {
    verdict = gather_.gather(number_++, mine.encode(),
                             {.timeout = timeout,
                              .patience = base::twice(timeout),
                              .name_all = true,
                              .who = base::cat(who, ", running ", mine.text()),
                              .still_worth_it = still_worth_it},
                             judge);
  } catch (const Error& error) {
    Failure failure = error.failure();
    failure.message += base::stack_trace_if_asked();
    base::raise(std::move(failure));
  }
  const auto calls = decode_all(verdict);
  for (std::size_t i = 0; i < calls.size() && i < ranks_.size(); ++i) {
    const auto other = Fingerprint::decode(calls[i]);
    const auto differences = mine.differences(other);
    if (differences.empty()) continue;
    base::raise(ErrorKind::kUsage,
                base::cat(who, ": ranks are out of step: rank ", ranks_[static_cast<std::size_t>(rank_)],
                          " runs (", mine.text(), "), but rank ", ranks_[i], " runs (", other.text(),
                          "). They differ in ", differences, base::stack_trace_if_asked()),
                ErrorFamily::kBackend);
  }
  // In step with everyone, but others are not among themselves: shapes that only some compare.
  if (!calls.empty())
    base::raise(ErrorKind::kUsage, base::cat(who, ": other ranks are out of step with each other"),
                ErrorFamily::kBackend);
}

}  // namespace lockstep::internal
