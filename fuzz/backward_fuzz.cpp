// Random bytes as the messages of a backward pass across workers. Read or refused with kUsage; what was read
// is written again as it was.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "lockstep/autograd/internal/messages.h"
#include "lockstep/base/detail/byte_io.h"

namespace {

using namespace lockstep;
using namespace lockstep::autograd::internal;

void require(bool holds) {
  if (!holds) std::abort();
}

// Of `input`, behind the first byte, which says what it is to be.
void read_one(std::span<const std::uint8_t> input) {
  const std::uint8_t what = input[0];
  base::ByteReader reader(input.subspan(1));
  base::ByteWriter writer;
  if (what % 5 == 4) {  // its text is cut and completed: only that it holds
    NodeFailure::read(reader);
    return;
  }
  if (what % 5 == 0) PassHead::read(reader).write(writer);
  if (what % 5 == 1) write_messages(writer, read_messages(reader));
  if (what % 5 == 2) write_plan_requests(writer, read_plan_requests(reader));
  if (what % 5 == 3) write_workers(writer, read_workers(reader));
  const Bytes again = writer.take();
  require(again.size() == reader.position());
  // Workers may come in any order, and are written in theirs.
  require(what % 5 == 2 || std::equal(again.begin(), again.end(), input.begin() + 1));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  try {
    read_one({data, size});
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kUsage);
  }
  return 0;
}
