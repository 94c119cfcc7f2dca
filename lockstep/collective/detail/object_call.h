// One call of an object collective: its arguments are checked, its bytes moved by the tensor collectives, its
// values decoded with the sender named in errors. The part of objects.h that is not a template.
// Thread safety: one thread; an ObjectCall lives for one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/group/process_group.h"
#include "lockstep/object/object.h"

namespace lockstep::internal {

// What is sent: one byte string per object. If one of them could not be encoded, every part carries the
// reason: this rank participates nevertheless, so that the others get the error and do not wait.
struct EncodedObjects {
  std::vector<Bytes> parts;
  bool failed = false;
};

// What was received: several byte strings in one buffer.
struct ReceivedObjects {
  at::Tensor buffer;
  std::vector<std::span<const std::uint8_t>> parts;  // into buffer
  int from = -1;                                     // rank in the group, when one rank sent all
};

// What a value is sent and received as.
template <class T>
using SentAs = std::conditional_t<std::is_convertible_v<const T&, std::string_view>, std::string, T>;

class ObjectCall {
 public:
  template <class Options>
  ObjectCall(const char* name, const Options& options)
      : ObjectCall(name, options.group, options.timeout, options.where) {
    if constexpr (requires { options.device; }) check_device(options.device);
  }

  // False, with a warning, on a process that is not in the group.
  bool takes_part() const;
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  int world_rank(int rank) const;

  void check_length(std::size_t n, const char* role) const;
  void check_not_empty(std::size_t n, const char* role) const;
  // The list has one entry per rank on rank `root` and is empty elsewhere.
  template <class T>
  void check_list_at(int root, const char* role, const std::vector<T>& list) const {
    check_presence(root, role, !list.empty());
    if (!list.empty()) check_length(list.size(), role);
  }
  // A rank in the group, from what the caller gave.
  int root(std::optional<int> in_world, std::optional<int> in_group, const char* role,
           std::optional<int> fallback) const;
  // As root; this rank itself is refused.
  int peer(std::optional<int> in_world, std::optional<int> in_group, const char* role) const;
  std::optional<int> peer_or_any(std::optional<int> in_world, std::optional<int> in_group,
                                 const char* role) const;

  // All of them raise the error of a rank that could not encode, on that rank and on the ranks that were to
  // receive its objects.
  ReceivedObjects all_gather(const EncodedObjects& object);
  // Parts on `dst` only.
  ReceivedObjects gather(const EncodedObjects& object, int dst);
  // The same number of objects on every rank; their bytes are read on `src` only.
  ReceivedObjects broadcast(const EncodedObjects& objects, int src);
  // One part. `objects` are given on `src`, one per rank.
  ReceivedObjects scatter(const EncodedObjects& objects, int src);
  void send(const EncodedObjects& objects, int dst, bool use_batch);
  ReceivedObjects receive(std::size_t n, std::optional<int> src, bool use_batch);

  template <class T>
  static EncodedObjects encode_one(const T& object) try {
    return {.parts = {encode_as_sent<T>(object)}};
  } catch (...) {
    return why_not_encoded(1);
  }
  template <class T>
  static EncodedObjects encode_each(const std::vector<T>& objects) try {
    EncodedObjects encoded;
    for (const auto& object : objects) encoded.parts.push_back(encode_as_sent<T>(object));
    return encoded;
  } catch (...) {
    return why_not_encoded(objects.size());
  }
  // Part i came from rank i, or all of them from rank `from`.
  template <class T>
  std::vector<T> decode_each(const ReceivedObjects& received, int from = -1) const {
    std::vector<T> values;
    for (std::size_t i = 0; i < received.parts.size(); ++i) {
      try {
        values.push_back(decode<T>(received.parts[i]));
      } catch (const Error& error) {
        refuse_object(error, i, from);
      }
    }
    return values;
  }

 private:
  ObjectCall(const char* name, const Group& group, std::optional<Milliseconds> timeout,
             std::source_location where);

  template <class... Parts>
  [[noreturn]] void refuse(ErrorKind kind, const Parts&... parts) const {
    base::raise(kind, base::cat(prefix(), parts...));
  }
  template <class T>
  static Bytes encode_as_sent(const T& object) {
    if constexpr (std::is_same_v<SentAs<T>, T>) {
      return encode<T>(object);
    } else {
      return encode(std::string(std::string_view(object)));
    }
  }
  // "gather_object of group "0" (rank 1 of 4, called at train.cpp:42)".
  std::string called() const;
  std::string prefix() const;
  // The current exception as `n_parts` parts; inside a catch block.
  static EncodedObjects why_not_encoded(std::size_t n_parts);
  // Raises what rank `from` of the group put into why_not_encoded().
  [[noreturn]] void refuse_failed(int from, std::span<const std::uint8_t> encoded) const;
  void check_encoded(const ReceivedObjects& received, std::span<const std::int64_t> sizes) const;
  [[noreturn]] void refuse_object(const Error& error, std::size_t index, int from) const;
  void check_device(const std::optional<c10::Device>& device) const;
  void check_presence(int root, const char* role, bool given) const;
  void check_count(std::int64_t came, std::size_t expected, int from) const;
  // The options of a tensor operation that is a part of this call.
  template <class Options>
  Options step(Options options) const {
    options.group = group_;
    options.timeout = left();
    options.where = where_;
    return options;
  }
  Milliseconds left() const;
  ReceivedObjects room_for(std::span<const std::int64_t> sizes) const;
  // A list as one buffer, preceded by a header with its number of parts and its size.
  ReceivedObjects room_for_list(std::span<const std::int64_t> head) const;
  void cut(ReceivedObjects& received, std::span<const std::int64_t> head, std::size_t n) const;
  void send_tensor(const at::Tensor& tensor, int dst, bool use_batch);
  int receive_tensor(const at::Tensor& tensor, std::optional<int> src, bool use_batch);

  const char* const name_;
  const Group group_;
  const Deadline deadline_;
  const std::source_location where_;
};

}  // namespace lockstep::internal
