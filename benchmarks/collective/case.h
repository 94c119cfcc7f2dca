// One thing to measure: which operation, on how many bytes, as every contender understands it.
//
// `n_bytes` is the size of the larger of an operation's two buffers; the other one is as large, or one rank's
// block of it (n_bytes / size):
//   broadcast, all_reduce, reduce   one buffer of n_bytes, in place; root is rank 0
//   all_gather, gather              send a block, receive n_bytes (gather: on rank 0 only)
//   reduce_scatter, scatter         send n_bytes (scatter: on rank 0 only), receive a block
//   all_to_all                      send n_bytes, receive n_bytes
//   send_recv                       n_bytes to the partner and, when they are there, n_bytes back: two
//                                   operations, one way
//   exchange                        n_bytes to the partner while n_bytes come from it
//   barrier                         nothing
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

#include "benchmarks/common/link.h"
#include "benchmarks/common/request.h"

namespace bench {

enum class Kind {
  kBarrier,
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kReduceScatter,
  kScatter,
  kAllToAll,
  kSendRecv,
  kExchange
};

enum class Extent { kNothing, kBlock, kWhole, kWholeOnRoot };

struct KindRow {
  std::string_view name;
  Extent send;
  Extent recv;
  bool in_place = false;
};

// In the order of Kind.
inline constexpr std::array<KindRow, 11> kKinds{{
    {"barrier", Extent::kNothing, Extent::kNothing},
    {"broadcast", Extent::kWhole, Extent::kWhole, true},
    {"all_reduce", Extent::kWhole, Extent::kWhole, true},
    {"reduce", Extent::kWhole, Extent::kWhole, true},
    {"all_gather", Extent::kBlock, Extent::kWhole},
    {"gather", Extent::kBlock, Extent::kWholeOnRoot},
    {"reduce_scatter", Extent::kWhole, Extent::kBlock},
    {"scatter", Extent::kWholeOnRoot, Extent::kBlock},
    {"all_to_all", Extent::kWhole, Extent::kWhole},
    {"send_recv", Extent::kWhole, Extent::kWhole},
    {"exchange", Extent::kWhole, Extent::kWhole},
}};

struct Case {
  Kind kind = Kind::kBarrier;
  std::string place;  // where buffers lie, for contenders that have a choice
  std::size_t n_bytes = 0;
  std::size_t n_buffers = 1;  // gone through in turn
  int rank = 0;
  int size = 1;

  bool operator==(const Case&) const = default;
  const KindRow& row() const { return kKinds[static_cast<std::size_t>(kind)]; }
  // Elements are float32.
  std::size_t n_whole() const { return n_bytes / sizeof(float); }
  std::size_t n_block() const { return std::max<std::size_t>(n_whole() / static_cast<std::size_t>(size), 1); }
  std::size_t n_send() const { return elements(row().send); }
  std::size_t n_recv() const { return elements(row().recv); }
  // Of send_recv and exchange: half the ranks away, so on the other host where there are two.
  int partner() const { return (rank + size / 2) % size; }
  // Operations in one turn of the measured loop.
  int operations() const { return kind == Kind::kSendRecv ? 2 : 1; }

 private:
  std::size_t elements(Extent extent) const {
    switch (extent) {
      case Extent::kNothing:
        return 0;
      case Extent::kBlock:
        return n_block();
      case Extent::kWhole:
        return n_whole();
      case Extent::kWholeOnRoot:
        return rank == 0 ? n_whole() : 0;
    }
    return 0;
  }
};

// Request: kind, place, bytes, buffers.
inline Case case_of(const Request& request, const Link& link) {
  const std::string& name = request.text("kind");
  for (std::size_t k = 0; k < kKinds.size(); ++k) {
    if (kKinds[k].name != name) continue;
    const Case which{.kind = static_cast<Kind>(k),
                     .place = request.text("place"),
                     .n_bytes = static_cast<std::size_t>(request.number("bytes")),
                     .n_buffers = static_cast<std::size_t>(request.number("buffers")),
                     .rank = link.rank(),
                     .size = link.size()};
    if (!which.row().in_place &&
        which.n_bytes % (sizeof(float) * static_cast<std::size_t>(which.size)) != 0) {
      throw std::runtime_error("bytes= must be a whole number of float32 per rank");
    }
    return which;
  }
  throw std::runtime_error("no operation named " + name);
}

// For a contender that cannot do this one.
[[noreturn]] inline void refuse(const Case& which) {
  throw std::runtime_error("this contender has no " + std::string(which.row().name));
}

}  // namespace bench
