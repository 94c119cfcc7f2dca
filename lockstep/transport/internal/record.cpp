#include "lockstep/transport/internal/record.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "lockstep/base/detail/forks.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::transport::internal {
namespace {

// One block of another's heap, given back when the last of its views ends, which may be after the transport
// has. A forked child has a copy of it and gives nothing back: the block is its parent's. release: every
// read of the block comes before it, and the sender, which acquires, may reuse the memory.
class Loan {
 public:
  Loan(Mapping heap, std::uint64_t payload) : heap_(std::move(heap)), payload_(payload) {}
  ~Loan() {
    if (!made_here_) return;
    auto* head = reinterpret_cast<BlockHead*>(heap_->data() + payload_ - sizeof(BlockHead));
    head->held.store(0, std::memory_order_release);
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  const std::uint8_t* data() const { return heap_->data() + payload_; }

 private:
  const base::MadeHere made_here_;
  const Mapping heap_;
  const std::uint64_t payload_;
};

template <class Value>
Value value_at(const std::uint8_t* data) {
  Value value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

const object::Blob& part_of(const Message& message, std::size_t i) {
  return i == 0 ? message.body : message.blobs[i - 1];
}

// That the range is inside the segment is all that can be checked here: which blocks exist is known to the
// sender alone. A wrong offset shows the receiver other bytes of that sender, never memory of anybody else.
bool is_payload(std::uint64_t offset, std::uint64_t n_bytes, const net::Segment& heap) {
  return offset % kLine == 0 && offset >= sizeof(BlockHead) && offset <= heap.size() &&
         n_bytes <= heap.size() - offset;
}

Decoded refuse(std::string why) {
  return {.error = std::move(why)};
}

void take_back(MessageHeap& heap, std::span<const std::uint64_t> blocks) {
  for (const std::uint64_t block : blocks) heap.take_back(block);
}

// The record itself goes to the heap, `record` becomes one that says where.
//
//   ring:  head (elsewhere = 1), one part ---> heap: head, table of parts, small parts ---> heap: large parts
bool put_elsewhere(MessageHeap& heap, const std::shared_ptr<Holder>& holder, Bytes& record) {
  const auto at = heap.allocate(record.size(), holder);
  if (!at) return false;
  std::memcpy(heap.at(*at), record.data(), record.size());
  heap.filled(*at);
  auto head = value_at<RecordHead>(record.data());
  const RecordPart part{.offset = kInHeap | *at, .n_bytes = record.size()};
  head.n_bytes = kMinRecord;
  head.elsewhere = 1;
  head.n_parts = 1;
  record.resize(kMinRecord);
  std::memcpy(record.data(), &head, sizeof head);
  std::memcpy(record.data() + sizeof head, &part, sizeof part);
  return true;
}

Decoded decode(const Buffer& record, std::uint64_t n_bytes, const Sender& sender) {
  const auto head = value_at<RecordHead>(record.data());
  if (head.n_parts == 0 || head.n_parts > kMaxParts ||
      head.n_parts > (n_bytes - sizeof(RecordHead)) / sizeof(RecordPart)) {
    return refuse(base::cat("a record of ", n_bytes, " bytes that has ", head.n_parts, " parts"));
  }
  Message message{.kind = head.kind, .id = head.id};
  message.blobs.reserve(head.n_parts - 1);
  std::uint64_t left = sender.max_message_bytes;
  for (std::uint32_t i = 0; i < head.n_parts; ++i) {
    const auto part = value_at<RecordPart>(record.data() + sizeof(RecordHead) + i * sizeof(RecordPart));
    if (part.n_bytes > left)
      return refuse(base::cat("a message beyond the limit of ", sender.max_message_bytes, " bytes"));
    left -= part.n_bytes;
    // The receiver may write into it: a block in the heap is its alone until it is returned.
    object::Blob blob{.yours = true};
    if ((part.offset & kInHeap) != 0) {
      const std::uint64_t offset = part.offset & ~kInHeap;
      if (!sender.heap || !is_payload(offset, part.n_bytes, *sender.heap)) {
        return refuse(
            base::cat("a part of ", part.n_bytes, " bytes at ", offset, ", outside its shared memory"));
      }
      // From here on an error returns the block too: the blobs decoded so far are released with the message.
      const auto loan = std::make_shared<const Loan>(sender.heap, offset);
      blob.bytes = {loan->data(), part.n_bytes};
      blob.owner = loan;
    } else {
      if (part.offset > n_bytes || part.n_bytes > n_bytes - part.offset) {
        return refuse(
            base::cat("a part of ", part.n_bytes, " bytes at ", part.offset, " of a record of ", n_bytes));
      }
      blob.bytes = {record.data() + part.offset, part.n_bytes};
      blob.owner = record.owner();
    }
    if (i == 0) {
      message.body = std::move(blob);
    } else {
      message.blobs.push_back(std::move(blob));
    }
  }
  return {.message = std::move(message)};
}

}  // namespace

// Blocks are allocated one by one; when one cannot be, the earlier ones are returned, and the caller reports
// kResource.
bool encode_record(const Message& message, MessageHeap& heap, const std::shared_ptr<Holder>& holder,
                   Bytes& record) {
  const std::size_t n_parts = 1 + message.blobs.size();
  std::uint64_t end = sizeof(RecordHead) + n_parts * sizeof(RecordPart);
  record.clear();
  record.resize(end);
  std::vector<std::uint64_t> blocks;
  for (std::size_t i = 0; i < n_parts; ++i) {
    const auto bytes = part_of(message, i).bytes;
    RecordPart part{.n_bytes = bytes.size()};
    if (bytes.size() > kMaxSmallPart) {
      const auto at = heap.allocate(bytes.size(), holder);
      if (!at) {
        take_back(heap, blocks);
        return false;
      }
      blocks.push_back(*at);
      std::memcpy(heap.at(*at), bytes.data(), bytes.size());
      heap.filled(*at);
      part.offset = kInHeap | *at;
    } else {
      // The body is read by a decoder that does not care; blobs become tensors.
      part.offset = i == 0 ? end : round_to_lines(end);
      end = part.offset + bytes.size();
      record.resize(end);
      if (!bytes.empty()) std::memcpy(record.data() + part.offset, bytes.data(), bytes.size());
    }
    std::memcpy(record.data() + sizeof(RecordHead) + i * sizeof part, &part, sizeof part);
  }
  // A record of many parts says its length where it is referred to, so it may leave 32 bits.
  const RecordHead head{.n_bytes = static_cast<std::uint32_t>(end),
                        .kind = message.kind,
                        .n_parts = static_cast<std::uint32_t>(n_parts),
                        .id = message.id};
  std::memcpy(record.data(), &head, sizeof head);
  if (end <= kMaxRingRecord || put_elsewhere(heap, holder, record)) return true;
  take_back(heap, blocks);
  return false;
}

// Recursion ends after one step: a record in the heap refers to parts, not to a further record, and that is
// checked.
void take_back_record(MessageHeap& heap, std::span<const std::uint8_t> record) {
  if (record.size() < kMinRecord) return;
  const auto head = value_at<RecordHead>(record.data());
  const std::uint64_t room = (record.size() - sizeof(RecordHead)) / sizeof(RecordPart);
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(head.n_parts, room); ++i) {
    const auto part = value_at<RecordPart>(record.data() + sizeof(RecordHead) + i * sizeof(RecordPart));
    const std::uint64_t offset = part.offset & ~kInHeap;
    if (offset == part.offset || !is_payload(offset, part.n_bytes, *heap.mapping())) continue;
    // The record there refers to no further one.
    if (head.elsewhere == 1 && part.n_bytes >= kMinRecord &&
        heap.at(offset)[offsetof(RecordHead, elsewhere)] == 0) {
      take_back_record(heap, {heap.at(offset), part.n_bytes});
    }
    heap.take_back(offset);
  }
}

Decoded decode_record(const Buffer& record, std::uint64_t n_bytes, const Sender& sender) {
  if (n_bytes < kMinRecord) return refuse(base::cat("a record of ", n_bytes, " bytes"));
  const auto head = value_at<RecordHead>(record.data());
  if (head.elsewhere == 0) return decode(record, n_bytes, sender);
  const auto part = value_at<RecordPart>(record.data() + sizeof(RecordHead));
  const std::uint64_t offset = part.offset & ~kInHeap;
  // Small parts, their table and the gaps between them.
  const std::uint64_t most = sender.max_message_bytes + kMaxParts * 2 * kLine;
  if (head.elsewhere != 1 || head.n_parts != 1 || (part.offset & kInHeap) == 0 || part.n_bytes < kMinRecord ||
      part.n_bytes > most || !sender.heap || !is_payload(offset, part.n_bytes, *sender.heap)) {
    return refuse(
        base::cat("a record of ", part.n_bytes, " bytes at ", offset, ", outside its shared memory"));
  }
  const Loan loan(sender.heap, offset);
  // A copy, since the sender could change the table between the check and the use.
  const Buffer copy(part.n_bytes);
  std::memcpy(copy.data(), loan.data(), part.n_bytes);
  return decode(copy, part.n_bytes, sender);
}

}  // namespace lockstep::transport::internal
