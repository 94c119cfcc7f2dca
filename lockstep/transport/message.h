// A message between workers: a kind and an id whose meaning is up to the sender, a body, and large blobs
// (tensors) beside it that are not copied into it.
// Thread safety: a value type; copies share the bytes behind their blobs.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "lockstep/base/bytes.h"
#include "lockstep/object/encoder.h"

namespace lockstep::transport {

// Workers of a job are numbered; the number is also the high part of every id that a worker generates.
using WorkerId = std::uint16_t;

struct Message {
  std::uint8_t kind = 0;
  std::uint64_t id = 0;
  object::Blob body{};    // must have an owner when it is sent; the receiver gets its own
  object::Blobs blobs{};  // likewise
};

// Bytes as a blob that owns them.
inline object::Blob owned_blob(Bytes bytes) {
  auto owner = std::make_shared<const Bytes>(std::move(bytes));
  const std::span<const std::uint8_t> view = *owner;
  return {.owner = std::move(owner), .bytes = view, .yours = true};
}

// Bytes of body and blobs together.
inline std::uint64_t size_of(const Message& message) {
  std::uint64_t sum = message.body.bytes.size();
  for (const auto& blob : message.blobs) sum += blob.bytes.size();
  return sum;
}

}  // namespace lockstep::transport
