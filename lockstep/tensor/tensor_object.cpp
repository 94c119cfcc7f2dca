#include "lockstep/tensor/tensor_object.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <ranges>
#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/object/tensor_code.h"
#include "lockstep/tensor/detail/device_stream.h"
#include "lockstep/tensor/internal/call_streams.h"
#include "lockstep/tensor/internal/device_copies.h"

namespace lockstep::object {
namespace {

// Below it a copy costs less than keeping the message.
constexpr std::size_t kViewFrom = 1024;
// As libtorch's own limit for operators that loop over dimensions.
constexpr std::uint32_t kMaxDimensions = 64;

thread_local TensorScope* scope_here = nullptr;

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

// The elements as they are, on the CPU.
at::Tensor plain(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().cpu().resolve_conj().resolve_neg();
}

// The same of a tensor in a message to another worker: complete when the copies of `transit` are.
at::Tensor staged(object::DeviceTransit& transit, const at::Tensor& tensor) {
  lockstep::internal::follow_device(tensor.device());
  if (!transit.copies) transit.copies = std::make_shared<lockstep::internal::DeviceCopies>();
  return static_cast<lockstep::internal::DeviceCopies&>(*transit.copies).stage(tensor);
}

// The device that is written: that of the tensor, or in a message that for which the maps exchange it.
c10::Device device_there(const Encoder& encoder, const at::Tensor& tensor) {
  const auto device = tensor.device();
  const auto* transit = encoder.transit();
  if (device.is_cpu() || transit == nullptr || transit->targets == nullptr) return device;
  if (!device.is_cuda()) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("a tensor on ", device.str(),
                          " cannot be sent to another worker; move it to the CPU before sending it"));
  }
  const int index = transit->targets->target(device.index());
  return {device.type(), static_cast<c10::DeviceIndex>(index)};
}

// The dimensions of a tensor without gaps in memory order, outermost first; empty when that is row-major, or
// it has gaps.
std::vector<std::uint8_t> memory_order(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) return {};
  std::vector<std::uint8_t> order(static_cast<std::size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), std::uint8_t{0});
  // A dimension of size 1 may be anywhere: its stride has no meaning.
  std::ranges::stable_sort(order, [&](int a, int b) { return tensor.stride(a) > tensor.stride(b); });
  return order;
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
  const bool on_meta = head.device_type == static_cast<std::uint8_t>(c10::DeviceType::Meta);
  if (head.device_type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES || on_meta || head.device_index < -1 ||
      (on_cpu && head.device_index > 0) || head.flags > kAllTensorFlags ||
      (head.flags & (kSparse | kCoalesced)) == kCoalesced ||
      (head.flags & (kSparse | kPermuted)) == (kSparse | kPermuted))
    decoder.refuse("no tensor has this device or these flags; the object is damaged");
  if ((head.flags & kRequiresGrad) != 0 && !at::isFloatingType(head.dtype) && !at::isComplexType(head.dtype))
    decoder.refuse(c10::toString(head.dtype), " tensors have no gradient");
  return head;
}

// Of a tensor without gaps whose dimensions have this memory order.
std::vector<std::int64_t> strides_of(c10::IntArrayRef sizes, std::span<const std::uint8_t> order) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (const auto dimension : std::views::reverse(order)) {
    strides[dimension] = stride;
    stride *= std::max<std::int64_t>(sizes[dimension], 1);  // take_sizes has seen that it cannot overflow
  }
  return strides;
}

// u8 order[n]: each dimension once.
std::vector<std::int64_t> take_strides(Decoder& decoder, c10::IntArrayRef sizes) {
  std::vector<std::uint8_t> order(sizes.size());
  std::vector<bool> seen(sizes.size());
  for (auto& dimension : order) {
    dimension = decoder.take<std::uint8_t>();
    if (dimension >= sizes.size() || seen[dimension])
      decoder.refuse("no tensor has this order of dimensions; the object is damaged");
    seen[dimension] = true;
  }
  return strides_of(sizes, order);
}

// A dense tensor of the next blob: a view of it where it may be kept, else a copy.
at::Tensor take_elements(Decoder& decoder, at::ScalarType dtype, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides) {
  const Blob blob = decoder.take_held_blob();
  const auto width = c10::elementSize(dtype);
  const auto n = c10::multiply_integers(sizes);
  if (blob.bytes.size() % width != 0 || blob.bytes.size() / width != static_cast<std::uint64_t>(n))
    decoder.refuse(blob.bytes.size(), " bytes arrived for ", n, " elements of ", c10::toString(dtype));
  if (dtype == at::kBool && std::ranges::any_of(blob.bytes, [](std::uint8_t byte) { return byte > 1; }))
    decoder.refuse("a bool is 0 or 1; the object is damaged");
  const auto options = at::TensorOptions().dtype(dtype);
  const bool aligned = reinterpret_cast<std::uintptr_t>(blob.bytes.data()) % width == 0;
  if (blob.yours && blob.owner && aligned && blob.bytes.size() >= kViewFrom) {
    return at::from_blob(
        const_cast<std::uint8_t*>(blob.bytes.data()), sizes, strides, [owner = blob.owner](void*) {},
        options);
  }
  at::Tensor tensor = at::empty_strided(sizes, strides, options);
  if (!blob.bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), blob.bytes.data(), blob.bytes.size());
  return tensor;
}

// In row-major order.
at::Tensor take_elements(Decoder& decoder, at::ScalarType dtype, c10::IntArrayRef sizes) {
  return take_elements(decoder, dtype, sizes, c10::contiguous_strides(sizes));
}

// Every index is in bounds, and they ascend if declared so.
void check_indices(Decoder& decoder, const at::Tensor& indices, c10::IntArrayRef sizes, bool ascend) {
  const auto* at = indices.const_data_ptr<std::int64_t>();
  const std::int64_t n = indices.size(1);
  std::int64_t before = -1;
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t place = 0;  // take_sizes has seen that it cannot overflow
    for (std::int64_t d = 0; d < indices.size(0); ++d) {
      const auto index = at[d * n + i];
      const auto size = sizes[static_cast<std::size_t>(d)];
      if (index < 0 || index >= size) decoder.refuse("index ", index, " is outside of a dimension of ", size);
      place = place * size + index;
    }
    if (ascend && place <= before) decoder.refuse("indices do not ascend; the object is damaged");
    before = place;
  }
}

// u32 n_sparse, i64 nnz, blob indices, blob values.
at::Tensor take_sparse(Decoder& decoder, const Head& head, const std::vector<std::int64_t>& sizes) {
  const auto n_sparse = decoder.take<std::uint32_t>();
  const auto nnz = decoder.take<std::int64_t>();
  if (n_sparse == 0 || n_sparse > sizes.size() || nnz < 0)
    decoder.refuse("no sparse tensor has these dimensions; the object is damaged");
  std::vector<std::int64_t> values_sizes{nnz};
  values_sizes.insert(values_sizes.end(), sizes.begin() + n_sparse, sizes.end());
  std::int64_t reach = n_sparse;
  if (__builtin_mul_overflow(reach, std::max<std::int64_t>(nnz, 1), &reach))
    decoder.refuse("no sparse tensor has these dimensions; the object is damaged");
  reach = 1;
  for (const auto size : values_sizes) {
    if (__builtin_mul_overflow(reach, std::max<std::int64_t>(size, 1), &reach))
      decoder.refuse("no sparse tensor has these dimensions; the object is damaged");
  }
  const at::Tensor indices = take_elements(decoder, at::kLong, {std::int64_t{n_sparse}, nnz});
  const bool coalesced = (head.flags & kCoalesced) != 0;
  check_indices(decoder, indices, sizes, coalesced);
  const at::Tensor values = take_elements(decoder, head.dtype, values_sizes);
  return at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse),
                                       coalesced);
}

// On the device that the object names, which must exist. Of a message in the streams of its call, otherwise in the
// current one, blocking.
at::Tensor restored(Decoder& decoder, const at::Tensor& tensor, const Head& head) {
  const auto type = static_cast<c10::DeviceType>(head.device_type);
  if (type == c10::DeviceType::CPU) return tensor;
  auto* const transit = decoder.transit();
  // Without an index (-1) it is the current one; a message has an index, looked up in a map.
  const int least = transit == nullptr ? -1 : 0;
  if (head.device_index < least ||
      std::max<int>(head.device_index, 0) >= lockstep::internal::device_count(type)) {
    base::raise(
        ErrorKind::kUnsupported,
        base::cat("at ", decoder.path(),
                  transit == nullptr ? ": this tensor was on " : ": this tensor is for ",
                  c10::DeviceTypeName(type, true), ":", int{head.device_index},
                  ", which this process does not have; ",
                  transit == nullptr ? "move it to the CPU before sending it"
                                     : "check device_maps, and that this program has loaded libtorch's CUDA "
                                       "(lockstep::cuda::load)"));
  }
  const c10::Device device(type, head.device_index);
  if (transit == nullptr) return tensor.to(device);
  auto& streams = lockstep::internal::CallStreams::of(*transit);
  if (tensor.layout() == at::kStrided) return streams.place(tensor, device);
  streams.enter(device);
  at::Tensor sparse = tensor.to(device);
  streams.note(sparse._values());
  streams.note(sparse._indices());
  return sparse;
}

}  // namespace

TensorScope::Use::Use(TensorScope* scope) : before_(scope_here) {
  scope_here = scope;
}
TensorScope::Use::~Use() {
  scope_here = before_;
}

void Codec<at::Tensor>::write(Encoder& encoder, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    encoder.code(Code::kNothing);
    return;
  }
  const bool sparse = tensor.layout() == at::kSparse && tensor.sparse_dim() > 0;
  if ((tensor.layout() != at::kStrided && !sparse) || tensor.is_meta() ||
      !is_plain_data(tensor.scalar_type())) {
    base::raise(
        ErrorKind::kUnsupported,
        base::cat("a tensor of type ", tensor.toString(), tensor.is_meta() ? " on the meta device" : "",
                  " cannot be sent inside an object; send a dense or sparse COO tensor of numbers"));
  }
  const auto device = device_there(encoder, tensor);
  std::uint8_t flags = tensor.requires_grad() ? kRequiresGrad : 0;
  if (flags != 0 && scope_here != nullptr) scope_here->on_write(tensor);
  if (sparse) flags |= tensor.is_coalesced() ? kSparse | kCoalesced : kSparse;
  const bool stages = !sparse && !tensor.is_cpu() && encoder.transit() != nullptr;
  const at::Tensor elements = sparse   ? at::Tensor()
                              : stages ? staged(*encoder.transit(), tensor)
                                       : plain(tensor);
  const auto order = sparse ? std::vector<std::uint8_t>() : memory_order(elements);
  if (!order.empty()) flags |= kPermuted;
  encoder.code(Code::kTensor).put(static_cast<std::uint8_t>(tensor.scalar_type()));
  encoder.put(static_cast<std::uint8_t>(device.type()));
  encoder.put(static_cast<std::int8_t>(device.index()));
  encoder.put(flags);
  encoder.put(static_cast<std::uint32_t>(tensor.dim()));
  for (const auto size : tensor.sizes()) encoder.put(static_cast<std::int64_t>(size));
  // `data` has no gaps.
  const auto put_bytes = [&](at::Tensor data) {
    auto held = std::make_shared<const at::Tensor>(std::move(data));
    const auto* bytes = static_cast<const std::uint8_t*>(held->const_data_ptr());
    encoder.blob({.owner = held, .bytes = {bytes, held->nbytes()}});
  };
  if (!sparse) {
    for (const auto dimension : order) encoder.put(dimension);
    return put_bytes(order.empty() ? elements.contiguous() : elements);
  }
  const at::NoGradGuard no_grad;
  encoder.put(static_cast<std::uint32_t>(tensor.sparse_dim())).put(std::int64_t{tensor._nnz()});
  put_bytes(plain(tensor._indices()).contiguous());
  put_bytes(plain(tensor._values()).contiguous());
}

void Codec<at::Tensor>::read(Decoder& decoder, at::Tensor& out) {
  if (decoder.peek() == Code::kNothing) {
    decoder.take<std::uint8_t>();
    out = at::Tensor();
    return;
  }
  // Whoever finds the message decodes it: what that thread is in the middle of does not concern the tensor.
  const c10::InferenceMode ordinary(false);
  decoder.expect(Code::kTensor, name);
  const Head head = take_head(decoder);
  const auto sizes = take_sizes(decoder);
  if ((head.flags & kSparse) != 0) {
    out = take_sparse(decoder, head, sizes);
  } else if ((head.flags & kPermuted) != 0) {
    const auto strides = take_strides(decoder, sizes);
    out = take_elements(decoder, head.dtype, sizes, strides);
  } else {
    out = take_elements(decoder, head.dtype, sizes);
  }
  out = restored(decoder, out, head);
  if ((head.flags & kRequiresGrad) == 0) return;
  if (scope_here != nullptr) {
    scope_here->on_read(out);
  } else {
    out.set_requires_grad(true);
  }
}

}  // namespace lockstep::object
