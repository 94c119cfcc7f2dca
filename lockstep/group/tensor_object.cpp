#include "lockstep/group/tensor_object.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

namespace lockstep::object {
namespace {

constexpr std::uint8_t kRequiresGrad = 1;
// As libtorch's own limit for operators that loop over dimensions.
constexpr std::uint32_t kMaxDimensions = 64;

// Types whose elements are whole bytes of data and nothing else.
bool is_plain_data(at::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexHalf:
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kBool:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

// The elements in row-major order on the CPU.
at::Tensor flat(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
}

// Sizes whose elements, and strides, can be counted.
std::vector<std::int64_t> take_sizes(Decoder& decoder) {
  const auto n = decoder.take<std::uint32_t>();
  if (n > kMaxDimensions)
    decoder.refuse("a tensor of ", n, " dimensions; at most ", kMaxDimensions, " are read");
  std::vector<std::int64_t> sizes(n);
  std::int64_t reach = 1;
  for (auto& size : sizes) {
    size = decoder.take<std::int64_t>();
    if (size < 0 || __builtin_mul_overflow(reach, std::max<std::int64_t>(size, 1), &reach))
      decoder.refuse("no tensor has these sizes; the object is damaged");
  }
  return sizes;
}

// A tensor's fixed part, as it came.
struct Head {
  at::ScalarType dtype;
  std::uint8_t device_type;
  std::int8_t device_index;
  std::uint8_t flags;
};

Head take_head(Decoder& decoder) {
  const Head head{.dtype = static_cast<at::ScalarType>(decoder.take<std::uint8_t>()),
                  .device_type = decoder.take<std::uint8_t>(),
                  .device_index = decoder.take<std::int8_t>(),
                  .flags = decoder.take<std::uint8_t>()};
  if (!is_plain_data(head.dtype)) decoder.refuse("no tensor has dtype ", static_cast<int>(head.dtype));
  const bool on_cpu = head.device_type == static_cast<std::uint8_t>(c10::DeviceType::CPU);
  if (head.device_type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES || head.device_index < -1 ||
      (on_cpu && head.device_index > 0) || head.flags > kRequiresGrad)
    decoder.refuse("no tensor has this device or these flags; the object is damaged");
  if (head.flags != 0 && !at::isFloatingType(head.dtype) && !at::isComplexType(head.dtype))
    decoder.refuse(c10::toString(head.dtype), " tensors have no gradient");
  return head;
}

std::span<const std::uint8_t> take_elements(Decoder& decoder, at::ScalarType dtype, std::int64_t n) {
  const auto bytes = decoder.take_blob();
  const auto width = c10::elementSize(dtype);
  if (bytes.size() % width != 0 || bytes.size() / width != static_cast<std::uint64_t>(n))
    decoder.refuse(bytes.size(), " bytes came for ", n, " elements of ", c10::toString(dtype));
  if (dtype == at::kBool && std::ranges::any_of(bytes, [](std::uint8_t byte) { return byte > 1; }))
    decoder.refuse("a bool is 0 or 1; the object is damaged");
  return bytes;
}

// Where it was before.
at::Tensor restored(Decoder& decoder, const at::Tensor& tensor, const Head& head) {
  const auto type = static_cast<c10::DeviceType>(head.device_type);
  if (type == c10::DeviceType::CPU) return tensor;
  try {
    return tensor.to(c10::Device(type, head.device_index));
  } catch (const std::exception&) {
    raise(ErrorKind::kUnsupported,
          cat("at ", decoder.path(), ": this tensor was on ", c10::DeviceTypeName(type, true), ":",
              int{head.device_index},
              ", which this process does not have; move it to the CPU before sending it"));
  }
}

}  // namespace

void Codec<at::Tensor>::write(Encoder& encoder, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    encoder.code(Code::kNothing);
    return;
  }
  if (tensor.layout() != at::kStrided || tensor.is_meta() || !is_plain_data(tensor.scalar_type())) {
    raise(ErrorKind::kUnsupported,
          cat("a tensor of type ", tensor.toString(), tensor.is_meta() ? " on the meta device" : "",
              " cannot be sent inside an object; send a dense tensor of numbers"));
  }
  encoder.code(Code::kTensor).put(static_cast<std::uint8_t>(tensor.scalar_type()));
  encoder.put(static_cast<std::uint8_t>(tensor.device().type()));
  encoder.put(static_cast<std::int8_t>(tensor.device().index()));
  encoder.put(tensor.requires_grad() ? kRequiresGrad : std::uint8_t{0});
  encoder.put(static_cast<std::uint32_t>(tensor.dim()));
  for (const auto size : tensor.sizes()) encoder.put(static_cast<std::int64_t>(size));
  auto data = std::make_shared<const at::Tensor>(flat(tensor));
  const auto* bytes = static_cast<const std::uint8_t*>(data->const_data_ptr());
  encoder.blob({.owner = data, .bytes = {bytes, data->nbytes()}});
}

void Codec<at::Tensor>::read(Decoder& decoder, at::Tensor& out) {
  if (decoder.peek() == Code::kNothing) {
    decoder.take<std::uint8_t>();
    return;
  }
  decoder.expect(Code::kTensor, name);
  const Head head = take_head(decoder);
  const auto sizes = take_sizes(decoder);
  const auto bytes = take_elements(decoder, head.dtype, c10::multiply_integers(sizes));
  out = at::empty(sizes, at::TensorOptions().dtype(head.dtype));
  if (!bytes.empty()) std::memcpy(out.mutable_data_ptr(), bytes.data(), bytes.size());
  out = restored(decoder, out, head);
  if (head.flags != 0) out.set_requires_grad(true);
}

}  // namespace lockstep::object
