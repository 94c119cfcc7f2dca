#include "lockstep/ddp/internal/usage_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/collective/collectives.h"

namespace lockstep::internal {

UsageExchange::UsageExchange(std::size_t n_parameters, Group group, std::source_location where)
    : group_(std::move(group)),
      where_(where),
      here_(n_parameters, 0),
      anywhere_(empty_shared({static_cast<std::int64_t>(n_parameters)}, at::kInt, {.group = group_})) {
  anywhere_.zero_();
}

void UsageExchange::forget_here() {
  std::ranges::fill(here_, 0);
}

// A sum rather than a logical or: any engine has it, and above zero means used by somebody.
void UsageExchange::start(bool with_zeros) {
  if (with_zeros) {
    std::memset(anywhere_.mutable_data_ptr(), 0, anywhere_.nbytes());
  } else {
    std::memcpy(anywhere_.mutable_data_ptr(), here_.data(), anywhere_.nbytes());
  }
  work_ = all_reduce(anywhere_, {.group = group_, .async_op = true, .where = where_});
}

void UsageExchange::wait() {
  std::exchange(work_, Work()).wait();
}

// has_changed_ tells the user whether static_graph could be set: did the set of unused parameters ever
// differ?
void UsageExchange::close(std::span<const BucketItem> items) {
  std::vector<unsigned char> unused(here_.size());
  unused_bytes_ = 0;
  for (std::size_t i = 0; i < unused.size(); ++i) {
    unused[i] = here_[i] == 0;
    if (unused[i] != 0) unused_bytes_ += items[i].n_bytes;
  }
  if (n_closed_++ != 0 && unused != unused_before_) has_changed_ = true;
  unused_before_ = std::move(unused);
}

}  // namespace lockstep::internal
