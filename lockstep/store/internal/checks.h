// Errors and checks that are the same in every store.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"

namespace lockstep::internal {

// "a, b, c", cut after a few so that a message about thousands of keys stays readable.
std::string join_keys(std::span<const std::string> keys);

// DistStoreError of kind kTimeout: which store waited how long for what.
[[noreturn]] void raise_wait_timeout(std::string_view store, Milliseconds timeout,
                                     std::span<const std::string> keys);

// The line of a wait that lasts (SlowWait): which store, for what.
std::string waiting_text(std::string_view store, std::span<const std::string> keys);

// DistStoreError of kind kUsage: get on a key that holds a queue.
[[noreturn]] void raise_is_queue(std::string_view store, const std::string& key);

// `value` as a decimal integer plus `amount`. DistStoreError of kind kUsage naming the key when it is not one
// or when the sum leaves 64 bits.
std::int64_t add_to_counter(const std::string& key, std::span<const std::uint8_t> value, std::int64_t amount);

// DistStoreError of kind kUsage when multi_set was given unequal lengths.
void check_pairs(std::size_t n_keys, std::size_t n_values);

}  // namespace lockstep::internal
