// How the ranks of one contender agree on what comes next, outside the measured path. Waiting sleeps, so that
// a contender whose turn it is not leaves the cores to the others.
#pragma once

#include <cstdint>
#include <string>

namespace bench {

class Link {
 public:
  virtual ~Link() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Rank 0's words, on every rank. Throws when another rank is gone.
  virtual std::string share(const std::string& words) = 0;
  // On rank 0: true when every rank said true. On the others: what they said.
  virtual bool all(bool mine) = 0;

  // Rank 0's number, on every rank.
  std::int64_t share_number(std::int64_t number) { return std::stoll(share(std::to_string(number))); }
};

}  // namespace bench
