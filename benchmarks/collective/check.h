// Does the operation do what its name says? Every rank fills its buffers with values of its own, runs it once
// and compares each element received with what must be there.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/collective/case.h"

namespace bench {

inline constexpr int kSumOfAll = -1;
// What a rank sends repeats after this many elements; odd, so that no block looks like its neighbour.
inline constexpr std::size_t kPeriod = 1021;

// One period of what a rank sends, or of the sum over all ranks: small whole numbers, so sums are exact in
// float32.
inline std::vector<float> pattern(int rank, int size) {
  std::vector<float> values(kPeriod);
  for (std::size_t i = 0; i < kPeriod; ++i) {
    for (int r = 0; r < size; ++r) {
      if (rank != kSumOfAll && r != rank) continue;
      values[i] += static_cast<float>((i * 7 + static_cast<std::size_t>(r) * 13) % kPeriod);
    }
  }
  return values;
}

// Where a received block comes from: a rank's send buffer (or the sum of all), from element `offset` on.
struct Source {
  int rank = 0;
  std::size_t offset = 0;
};

// Of the b-th of the n_block() elements received. Nothing: the operation leaves this buffer undefined.
inline std::optional<Source> source_of(const Case& which, std::size_t b) {
  const std::size_t own = static_cast<std::size_t>(which.rank) * which.n_block();
  switch (which.kind) {
    case Kind::kBarrier:
      return std::nullopt;
    case Kind::kBroadcast:
      return Source{0, b * which.n_block()};
    case Kind::kAllReduce:
      return Source{kSumOfAll, b * which.n_block()};
    case Kind::kReduce:
      if (which.rank != 0) return std::nullopt;
      return Source{kSumOfAll, b * which.n_block()};
    case Kind::kAllGather:
    case Kind::kGather:
      return Source{static_cast<int>(b), 0};
    case Kind::kReduceScatter:
      return Source{kSumOfAll, own};
    case Kind::kScatter:
      return Source{0, own};
    case Kind::kAllToAll:
      return Source{static_cast<int>(b), own};
    case Kind::kSendRecv:
    case Kind::kExchange:
      return Source{which.partner(), b * which.n_block()};
  }
  return std::nullopt;
}

inline bool received_right(const Case& which, std::span<const float> received) {
  const std::size_t n_block = which.n_block();
  for (std::size_t begin = 0; begin < received.size(); begin += n_block) {
    const auto source = source_of(which, begin / n_block);
    if (!source) continue;
    const std::vector<float> expected = pattern(source->rank, which.size);
    std::size_t at = source->offset % kPeriod;
    for (const float value : received.subspan(begin, std::min(n_block, received.size() - begin))) {
      if (value != expected[at]) return false;
      if (++at == kPeriod) at = 0;
    }
  }
  return true;
}

// Contender: as in measure.h, prepared for `which`. Throws on rank 0 when any rank got something wrong.
template <class Contender>
void check_result(Contender& contender, const Case& which, Link& link) {
  const std::vector<float> mine = pattern(which.rank, which.size);
  std::ranges::fill(contender.recv(0), -1.0f);
  const std::span<float> send = contender.send(0);
  for (std::size_t i = 0; i < send.size(); ++i) send[i] = mine[i % kPeriod];
  contender.run(0);
  if (!link.all(received_right(which, contender.recv(0)))) {
    throw std::runtime_error(std::string(which.row().name) + " gave a wrong result");
  }
}

}  // namespace bench
