#include "lockstep/host/internal/rows.h"

#include <algorithm>
#include <numeric>

#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/kernels.h"

namespace lockstep::comm::internal {
namespace {

// Bytes that are copied between two checks for an abort.
constexpr std::uint64_t kChunk = 1 << 20;
// Through the kernel into several runs: what stays in this core's cache until it is distributed.
constexpr std::uint64_t kKernelChunk = 128 << 10;

// Some runs of one length on both sides, as many as are copied at a time.
struct Burst {
  std::uint64_t run, n_runs, to_pitch, from_pitch;
};

// What comes next when `to_at` bytes of the current run of `to`, and `from_at` of that of `from`, are copied.
// Usually the runs of one side divide those of the other: many short ones are then a burst inside a long one.
Burst next_burst(const Runs& to, std::uint64_t to_at, const Runs& from, std::uint64_t from_at,
                 std::uint64_t left) {
  const std::uint64_t to_left = std::min(to.run - to_at, left),
                      from_left = std::min(from.run - from_at, left);
  const auto fit = [](std::uint64_t room, std::uint64_t run) {
    return std::max<std::uint64_t>(1, std::min(room, kChunk) / run);
  };
  if (to_at == 0 && from_at == 0 && to.run == from.run && to.run <= left)
    return {to.run, fit(left, to.run), to.pitch, from.pitch};
  if (from_at == 0 && from.run <= to_left) return {from.run, fit(to_left, from.run), from.run, from.pitch};
  if (to_at == 0 && to.run <= from_left) return {to.run, fit(from_left, to.run), to.pitch, to.run};
  return {std::min(to_left, from_left), 1, 0, 0};
}

// [begin, begin + n_bytes) of `to` from the beginning of `from`; both here.
bool copy_here(const Runs& to, std::uint64_t begin, const Runs& from, std::uint64_t n_bytes,
               std::uint64_t whole, const std::atomic<std::uint32_t>& broken) {
  for (std::uint64_t done = 0; done < n_bytes;) {
    if (broken.load(std::memory_order_relaxed) != 0) return false;
    const std::uint64_t at = begin + done;
    const std::uint64_t to_at = at % to.run, from_at = done % from.run;
    Burst burst = next_burst(to, to_at, from, from_at, n_bytes - done);
    if (burst.n_runs == 1) burst.run = std::min(burst.run, kChunk);
    auto* const target = to.first.here + at / to.run * to.pitch + to_at;
    const auto* const source = from.first.here + done / from.run * from.pitch + from_at;
    before_touch();
    if (target == source) {
      // The own part of an operation in place.
    } else if (whole >= kStreamFrom) {
      stream_copy_rows(target, burst.to_pitch, source, burst.from_pitch, burst.run, burst.n_runs);
    } else {
      for (std::uint64_t k = 0; k < burst.n_runs; ++k)
        copy_bytes(target + k * burst.to_pitch, source + k * burst.from_pitch, burst.run);
    }
    done += burst.run * burst.n_runs;
  }
  return true;
}

}  // namespace

bool copy_runs(const Runs& to, const Runs& from, std::uint64_t n_bytes, std::uint64_t whole,
               const std::atomic<std::uint32_t>& broken, std::vector<std::uint8_t>& scratch) {
  if (n_bytes == 0) return true;
  if (from.first.here != nullptr) return copy_here(to, 0, from, n_bytes, whole, broken);
  const bool scattered = to.run < n_bytes;
  const std::uint64_t chunk = scattered ? kKernelChunk : kChunk;
  if (scattered && scratch.size() < chunk) scratch.resize(chunk);
  for (std::uint64_t done = 0; done < n_bytes; done += chunk) {
    if (broken.load(std::memory_order_relaxed) != 0) return false;
    const std::uint64_t n = std::min(chunk, n_bytes - done);
    copy(scattered ? own_buffer(scratch.data()) : to.first + done, from.first + done, n);
    const Runs read{own_buffer(scratch.data()), n, n};
    if (scattered && !copy_here(to, done, read, n, 0, broken)) return false;
  }
  return true;
}

std::unique_ptr<std::uint8_t[]> pack_rows(const void* buffer, std::uint64_t rows,
                                          std::span<const std::uint64_t> parts,
                                          const std::atomic<std::uint32_t>& broken, Deadline until) {
  const std::uint64_t whole = std::accumulate(parts.begin(), parts.end(), std::uint64_t{0});
  auto packed = std::make_unique_for_overwrite<std::uint8_t[]>(whole);
  std::uint64_t before = 0, checked = 0;
  for (const std::uint64_t part : parts) {
    const Runs from = Runs::part_of(own_buffer(buffer), rows, whole, before, part);
    // In slices of whole rows, so that the clock is read between them. Less than a slice never reads it.
    const std::uint64_t slice = std::max<std::uint64_t>(1, kChunk / std::max<std::uint64_t>(from.run, 1));
    for (std::uint64_t done = 0; done < part;) {
      const std::uint64_t n = std::min(part - done, slice * from.run);
      const Runs rest{from.first + done / from.run * from.pitch, from.run, from.pitch};
      auto* const to = packed.get() + before + done;
      if (!copy_here({own_buffer(to), n, n}, 0, rest, n, 0, broken)) return nullptr;
      done += n;
      if (before + done - checked < kChunk || before + done == whole) continue;
      checked = before + done;
      if (until.expired()) return nullptr;
    }
    before += part;
  }
  return packed;
}

bool unpack_rows(void* buffer, std::uint64_t rows, std::span<const std::uint64_t> parts,
                 const std::uint8_t* packed, const std::atomic<std::uint32_t>& broken) {
  const std::uint64_t whole = std::accumulate(parts.begin(), parts.end(), std::uint64_t{0});
  std::uint64_t before = 0;
  for (const std::uint64_t part : parts) {
    const Runs to = Runs::part_of(own_buffer(buffer), rows, whole, before, part);
    const Runs from{own_buffer(packed + before), part, part};
    if (part > 0 && !copy_here(to, 0, from, part, 0, broken)) return false;
    before += part;
  }
  return true;
}

}  // namespace lockstep::comm::internal
