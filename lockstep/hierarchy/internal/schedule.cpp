#include "lockstep/hierarchy/internal/schedule.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "lockstep/engine/plugin.h"
#include "lockstep/hierarchy/internal/scale.h"

namespace lockstep::comm::hierarchy {
namespace {

using Counts = std::vector<std::uint64_t>;

std::uint64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

constexpr std::size_t kAhead =
    3;  // chunks that are under way in the first local step before the last one of the oldest

// The call, and what is worked out from it; small enough to be copied into the steps.
struct ScheduledCall {
  lockstep_op op;
  const Topology* at;
  std::size_t width;
  // A mean over hosts of different sizes: what each host's contribution is multiplied with before it crosses,
  // and the result after.
  double to_lane = 1, from_lane = 1;

  const std::uint8_t* sent(std::uint64_t index = 0) const {
    return static_cast<const std::uint8_t*>(op.send) + index * width;
  }
  std::uint8_t* received(std::uint64_t index = 0) const {
    return static_cast<std::uint8_t*>(op.recv) + index * width;
  }
  void enter_lane(std::uint8_t* data, std::uint64_t count) const {
    if (to_lane != 1) scale(op.dtype, data, count, to_lane);
  }
  void leave_lane(std::uint8_t* data, std::uint64_t count) const {
    if (from_lane != 1) scale(op.dtype, data, count, from_lane);
  }
  void copy(std::uint8_t* to, const std::uint8_t* from, std::uint64_t count) const {
    if (count > 0 && to != from) std::memcpy(to, from, count * width);
  }
  // Blocks in `order` (ranks), packed at `from`, to their places in the result.
  void put_in_rank_order(const std::uint8_t* from, const std::vector<int>& order,
                         const Counts& counts) const {
    Counts begins(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), std::uint64_t{0});
    for (const int r : order) {
      const auto i = static_cast<std::size_t>(r);
      copy(received(begins[i]), from, counts[i]);
      from += counts[i] * width;
    }
  }
};

class Builder {
 public:
  Builder(const lockstep_op& op, const Topology& topology, const Scratch& scratch)
      : call_{op, &topology, size_of(op.dtype)}, op_(call_.op), at_(topology), scratch_(scratch) {
    // The mean of means is the mean where every host has as many ranks.
    if (op.reduce == LOCKSTEP_AVG && !topology.even) weigh_means();
  }

  Schedule build() {
    switch (op_.kind) {
      case LOCKSTEP_BARRIER:
        barrier();
        break;
      case LOCKSTEP_BROADCAST:
        broadcast();
        break;
      case LOCKSTEP_ALL_REDUCE:
        at_.even ? all_reduce_on_lanes() : all_reduce_by_leaders();
        break;
      case LOCKSTEP_REDUCE:
        reduce();
        break;
      case LOCKSTEP_ALL_GATHER:
      case LOCKSTEP_ALL_GATHER_V:
        at_.even ? all_gather_on_lanes() : all_gather_by_leaders();
        break;
      case LOCKSTEP_REDUCE_SCATTER:
        at_.even ? reduce_scatter_on_lanes() : reduce_scatter_by_leaders();
        break;
      case LOCKSTEP_SEND:
      case LOCKSTEP_RECV:
        add(Where::kFlat, op_, {});
        break;
      default:
        flat();
    }
    for (Step& step : out_.steps) {
      if (!step.send_counts.empty()) step.op.send_counts = step.send_counts.data();
      if (!step.recv_counts.empty()) step.op.recv_counts = step.recv_counts.data();
    }
    return std::move(out_);
  }

 private:
  using Needs = std::vector<int>;

  // Sums are divided at the end. Not those of f16, which would overflow where the mean does not: there each
  // host's mean crosses, times its ranks over a power of two (which rounds little, or nothing) that is no
  // less than all ranks.
  void weigh_means() {
    lane_reduce_ = LOCKSTEP_SUM;
    if (op_.dtype != LOCKSTEP_F16) {
      local_reduce_ = LOCKSTEP_SUM;
      call_.from_lane = 1.0 / at_.size;
      return;
    }
    const double power = std::bit_ceil(static_cast<unsigned>(at_.size));
    call_.to_lane = at_.n_local() / power;
    call_.from_lane = power / at_.size;
  }

  int add(Where where, const lockstep_op& op, Needs needs) {
    std::erase(needs, -1);
    out_.steps.push_back({.where = where, .op = op, .needs = std::move(needs)});
    return static_cast<int>(out_.steps.size()) - 1;
  }
  // A step of another kind and other buffers, with the rest as in the call.
  int add(Where where, lockstep_op_kind kind, const void* send, void* recv, std::uint64_t count, Needs needs,
          int root = 0) {
    lockstep_op op = op_;
    op.kind = kind;
    op.reduce = where == Where::kLocal ? local_reduce_ : lane_reduce_;
    op.root = root;
    op.send = send;
    op.recv = recv;
    op.count = count;
    op.send_counts = op.recv_counts = nullptr;
    return add(where, op, std::move(needs));
  }
  // A reduction in place over the lane, of what the host has made in step `need`.
  int add_crossing(lockstep_op_kind kind, std::uint8_t* data, std::uint64_t count, int need, int root = 0) {
    const int index = add(Where::kLane, kind, data, data, count, {need}, root);
    step(index).before = [call = call_, data, count] { call.enter_lane(data, count); };
    return index;
  }
  Step& step(int index) { return out_.steps[static_cast<std::size_t>(index)]; }

  std::uint8_t* scratch(std::uint64_t count) {
    out_.memory.push_back(scratch_(std::max<std::uint64_t>(count * call_.width, 1)));
    return static_cast<std::uint8_t*>(out_.memory.back().get());
  }
  // Cuts [0, count) into pieces of about a chunk, each a multiple of `unit` but for the last.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> chunks(std::uint64_t count, std::uint64_t unit) const {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> out;
    const std::uint64_t each = std::max<std::uint64_t>(kChunkBytes / call_.width / unit, 1) * unit;
    for (std::uint64_t at = 0; at < count; at += each) out.emplace_back(at, std::min(each, count - at));
    if (out.empty()) out.emplace_back(0, 0);
    return out;
  }

  // After a local and a lane barrier every rank of an even topology knows that all have arrived: its lane
  // covers all hosts, each of which was complete. With leaders only, the others learn it by a second local
  // barrier.
  void barrier() {
    const int here = add(Where::kLocal, op_, {});
    int there = -1;
    if (at_.has_lane()) there = add(Where::kLane, op_, {here});
    if (!at_.even) add(Where::kLocal, op_, {here, there});
  }

  // The bytes cross in the lane of the root, or of the leaders; each host passes them on. Which rank of a
  // host that is:
  int bridge() const { return at_.even ? at_.place_of[static_cast<std::size_t>(op_.root)] : 0; }
  int root_host() const { return at_.host_of[static_cast<std::size_t>(op_.root)]; }
  int root_place() const { return at_.place_of[static_cast<std::size_t>(op_.root)]; }

  // On the root's host the local broadcast comes first, so that the bridge of that host has the bytes;
  // elsewhere the bridge gets them from the lane.
  void broadcast() {
    const bool home = at_.host() == root_host(), bridges = at_.place() == bridge();
    for (const auto& [at, count] : chunks(op_.count, 1)) {
      std::uint8_t* const data = call_.received(at);
      const auto local = [&, count = count](int need) {  // clang before 16 captures no structured binding
        return add(Where::kLocal, LOCKSTEP_BROADCAST, data, data, count, {need},
                   home ? root_place() : bridge());
      };
      int first = home ? local(-1) : -1;
      if (bridges) first = add(Where::kLane, LOCKSTEP_BROADCAST, data, data, count, {first}, root_host());
      if (!home) local(first);
    }
  }

  // Reduce-scatter inside the host, all-reduce of the own part over the lane, all-gather inside.
  void all_reduce_on_lanes() {
    // `even` elements divide evenly among the ranks of a host; the rest, fewer than n_local, or everything
    // when it is small, takes the shorter way at the end.
    const auto n = static_cast<std::uint64_t>(at_.n_local());
    const std::uint64_t even = op_.count * call_.width <= kSmallBytes ? 0 : op_.count / n * n;
    struct Chunk {
      std::uint64_t at, part;
      std::uint8_t* scratch;
      int reduced, crossed;
    };
    std::vector<Chunk> all;
    if (even > 0) {
      for (const auto& [at, count] : chunks(even, n)) all.push_back({at, count / n, nullptr, -1, -1});
    }
    const auto gather = [&](const Chunk& c) {
      add(Where::kLocal, LOCKSTEP_ALL_GATHER, c.scratch, call_.received(c.at), c.part, {c.crossed});
    };
    for (std::size_t i = 0; i < all.size(); ++i) {
      Chunk& c = all[i];
      // kAhead pieces of scratch are used in turn: chunk i reuses that of chunk i - kAhead, and so waits for
      // its gather.
      c.scratch = i < kAhead ? scratch(c.part) : all[i - kAhead].scratch;
      if (i >= kAhead) gather(all[i - kAhead]);
      c.reduced = add(Where::kLocal, LOCKSTEP_REDUCE_SCATTER, call_.sent(c.at), c.scratch, c.part,
                      {i >= kAhead ? static_cast<int>(out_.steps.size()) - 1 : -1});
      c.crossed = add(Where::kLane, LOCKSTEP_ALL_REDUCE, c.scratch, c.scratch, c.part, {c.reduced});
    }
    for (std::size_t i = all.size() - std::min(all.size(), kAhead); i < all.size(); ++i) gather(all[i]);
    if (even == op_.count && even > 0) return;
    const std::uint64_t rest = op_.count - even;
    std::uint8_t* const data = call_.received(even);
    const int here = add(Where::kLocal, LOCKSTEP_ALL_REDUCE, call_.sent(even), data, rest, {});
    add(Where::kLane, LOCKSTEP_ALL_REDUCE, data, data, rest, {here});
  }

  // Hosts of different sizes: reduce to the leader, all-reduce among the leaders, broadcast. The broadcast of
  // a chunk is scheduled behind the reductions of the next kAhead chunks, so that the local engine works
  // while a chunk crosses.
  void all_reduce_by_leaders() {
    struct Chunk {
      std::uint8_t* data;
      std::uint64_t count;
      int last;
    };
    std::vector<Chunk> all;
    const auto hand_out = [&](const Chunk& c) {
      const int last = add(Where::kLocal, LOCKSTEP_BROADCAST, c.data, c.data, c.count, {c.last}, 0);
      if (at_.has_lane()) step(last).before = [call = call_, c] { call.leave_lane(c.data, c.count); };
    };
    for (const auto& [at, count] : chunks(op_.count, 1)) {
      if (all.size() >= kAhead) hand_out(all[all.size() - kAhead]);
      std::uint8_t* const data = call_.received(at);
      int last = add(Where::kLocal, LOCKSTEP_REDUCE, call_.sent(at), data, count, {}, 0);
      if (at_.has_lane()) last = add_crossing(LOCKSTEP_ALL_REDUCE, data, count, last);
      all.push_back({data, count, last});
    }
    for (std::size_t i = all.size() - std::min(all.size(), kAhead); i < all.size(); ++i) hand_out(all[i]);
  }

  //   every host: reduce to its bridge --> lane: reduce to the bridge of the root's host --> if that is not the root: hand over
  //
  // The bridge is of the root's place where all hosts have one there, and then no hand-over is needed. The
  // hand-over is a broadcast, since the local engine need not offer send and receive (common()).
  void reduce() {
    const bool home = at_.host() == root_host(), bridges = at_.place() == bridge(),
               root = at_.rank == op_.root;
    const bool hands_over = home && bridge() != root_place();
    struct Chunk {
      std::uint8_t* data;
      std::uint64_t count;
      int last;
    };
    std::vector<Chunk> all;
    for (const auto& [at, count] : chunks(op_.count, 1)) {
      std::uint8_t* data = root ? call_.received(at) : nullptr;
      if ((bridges || hands_over) && !root) data = scratch(count);
      int last = add(Where::kLocal, LOCKSTEP_REDUCE, call_.sent(at), data, count, {}, bridge());
      if (bridges) last = add_crossing(LOCKSTEP_REDUCE, data, count, last, root_host());
      all.push_back({data, count, last});
    }
    if (hands_over) {  // from the leader of the root's host
      for (const Chunk& c : all) {
        const int last = add(Where::kLocal, LOCKSTEP_BROADCAST, c.data, c.data, c.count, {c.last}, bridge());
        if (bridges) step(last).before = [call = call_, c] { call.leave_lane(c.data, c.count); };
      }
    } else if (root) {
      out_.at_end = [call = call_] { call.leave_lane(call.received(), call.op.count); };
    }
  }

  // ---- gathering ----

  Counts counts_by_rank() const {
    if (op_.kind == LOCKSTEP_ALL_GATHER_V) return Counts(op_.recv_counts, op_.recv_counts + at_.size);
    return Counts(static_cast<std::size_t>(at_.size), op_.count);
  }
  int add_gather(Where where, const void* send, void* recv, Counts counts, Needs needs) {
    const int index = add(where, LOCKSTEP_ALL_GATHER_V, send, recv, 0, std::move(needs));
    step(index).recv_counts = std::move(counts);
    return index;
  }
  // Over the lane first, then each host puts its lanes together.
  // What arrives is ordered by place, then host; at_end puts it into rank order. Lane first: each byte
  // crosses the network once per host.
  void all_gather_on_lanes() {
    const Counts counts = counts_by_rank();
    Counts lane_counts, local_counts;
    std::vector<int> order;
    for (const int r : at_.lane()) lane_counts.push_back(counts[static_cast<std::size_t>(r)]);
    for (std::size_t place = 0; place < at_.neighbours().size(); ++place) {
      std::uint64_t total = 0;
      for (const auto& host : at_.hosts) {
        order.push_back(host[place]);
        total += counts[static_cast<std::size_t>(host[place])];
      }
      local_counts.push_back(total);
    }
    std::uint8_t* const mine = scratch(sum(lane_counts));
    std::uint8_t* const all = scratch(sum(counts));
    const int crossed = add_gather(Where::kLane, op_.send, mine, lane_counts, {});
    add_gather(Where::kLocal, mine, all, local_counts, {crossed});
    out_.at_end = [call = call_, all, order, counts] { call.put_in_rank_order(all, order, counts); };
  }

  void all_gather_by_leaders() {
    const Counts counts = counts_by_rank();
    Counts local_counts, host_counts;
    std::vector<int> order;
    for (const auto& host : at_.hosts) {
      std::uint64_t total = 0;
      for (const int r : host) {
        order.push_back(r);
        total += counts[static_cast<std::size_t>(r)];
      }
      host_counts.push_back(total);
    }
    for (const int r : at_.neighbours()) local_counts.push_back(counts[static_cast<std::size_t>(r)]);
    std::uint8_t* const here = scratch(sum(local_counts));
    std::uint8_t* const all = scratch(sum(counts));
    int last = add_gather(Where::kLocal, op_.send, here, local_counts, {});
    if (at_.has_lane()) last = add_gather(Where::kLane, here, all, host_counts, {last});
    add(Where::kLocal, LOCKSTEP_BROADCAST, all, all, sum(counts), {last}, 0);
    out_.at_end = [call = call_, all, order, counts] { call.put_in_rank_order(all, order, counts); };
  }

  // ---- reduce-scatter ----

  // Blocks for (place, host) beside each other, so that a local reduce-scatter leaves what belongs to the own
  // lane.
  void reduce_scatter_on_lanes() {
    const auto hosts = static_cast<std::uint64_t>(at_.n_hosts());
    std::uint8_t* const ordered = scratch(op_.count * static_cast<std::uint64_t>(at_.size));
    std::uint8_t* const mine = scratch(op_.count * hosts);
    const int here = add(Where::kLocal, LOCKSTEP_REDUCE_SCATTER, ordered, mine, op_.count * hosts, {});
    step(here).before = [call = call_, ordered] {
      std::uint8_t* to = ordered;
      for (std::size_t place = 0; place < call.at->neighbours().size(); ++place) {
        for (const auto& host : call.at->hosts) {
          call.copy(to, call.sent(static_cast<std::uint64_t>(host[place]) * call.op.count), call.op.count);
          to += call.op.count * call.width;
        }
      }
    };
    add(Where::kLane, LOCKSTEP_REDUCE_SCATTER, mine, op_.recv, op_.count, {here});
  }

  // Leaders reduce everything; each host's share is padded to that of the largest.
  void reduce_scatter_by_leaders() {
    const auto n = static_cast<std::uint64_t>(at_.size), hosts = static_cast<std::uint64_t>(at_.n_hosts());
    std::size_t most = 0;
    for (const auto& host : at_.hosts) most = std::max(most, host.size());
    const std::uint64_t share = most * op_.count;
    std::uint8_t* const sums = at_.has_lane() ? scratch(n * op_.count) : nullptr;
    std::uint8_t* const padded = at_.has_lane() ? scratch(hosts * share) : nullptr;
    std::uint8_t* const mine = at_.has_lane() ? scratch(share) : nullptr;
    int last = add(Where::kLocal, LOCKSTEP_REDUCE, op_.send, sums, n * op_.count, {}, 0);
    if (at_.has_lane()) {
      last = add(Where::kLane, LOCKSTEP_REDUCE_SCATTER, padded, mine, share, {last});
      step(last).before = [call = call_, sums, padded, share] {
        const auto& hosts_now = call.at->hosts;
        std::memset(padded, 0, hosts_now.size() * share * call.width);
        for (std::size_t h = 0; h < hosts_now.size(); ++h) {
          for (std::size_t p = 0; p < hosts_now[h].size(); ++p) {
            call.copy(padded + (h * share + p * call.op.count) * call.width,
                      sums + static_cast<std::uint64_t>(hosts_now[h][p]) * call.op.count * call.width,
                      call.op.count);
          }
        }
        call.enter_lane(padded, hosts_now.size() * share);
      };
    }
    const int end = add(Where::kLocal, LOCKSTEP_SCATTER, mine, op_.recv, op_.count, {last}, 0);
    if (at_.has_lane()) step(end).before = [call = call_, mine, share] { call.leave_lane(mine, share); };
  }

  // The flat communicator does it. Barriers beside it, which cost no time, so that a rank of the group that
  // calls something else meets a call it can be compared with.
  void flat() {
    lockstep_op barrier = op_;
    barrier.kind = LOCKSTEP_BARRIER;
    add(Where::kLocal, barrier, {});
    if (at_.has_lane()) add(Where::kLane, barrier, {});
    add(Where::kFlat, op_, {});
  }

  ScheduledCall call_;
  const lockstep_op& op_;
  const Topology& at_;
  const Scratch& scratch_;
  lockstep_reduce_op local_reduce_ = op_.reduce, lane_reduce_ = op_.reduce;
  Schedule out_;
};

}  // namespace

Schedule make_schedule(const lockstep_op& op, const Topology& topology, const Scratch& scratch) {
  return Builder(op, topology, scratch).build();
}

}  // namespace lockstep::comm::hierarchy
