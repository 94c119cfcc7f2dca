// Tensors as objects: there and back, what is refused, and bytes nobody wrote.
#include "lockstep/tensor/tensor_object.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

struct Checkpoint {
  int epoch = 0;
  std::map<std::string, at::Tensor> weights;
};
auto lockstep_fields(SelfOf<Checkpoint> auto& self) {
  return fields({.name = "Checkpoint", .version = 1, .members = "epoch weights"}, self.epoch, self.weights);
}

Failure refusal(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.failure();
  }
  return {.kind = ErrorKind::kInternal, .message = "nothing was raised"};
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const auto whole_a = a.detach().resolve_conj().contiguous(),
             whole_b = b.detach().resolve_conj().contiguous();
  return a.numel() == 0 ||
         std::memcmp(whole_a.const_data_ptr(), whole_b.const_data_ptr(), whole_a.nbytes()) == 0;
}

void expect_back(const at::Tensor& tensor) {
  const auto back = decode<at::Tensor>(encode(tensor));
  EXPECT_TRUE(same(back, tensor)) << tensor.toString() << tensor.sizes();
  EXPECT_TRUE(tensor.is_non_overlapping_and_dense() ? back.strides() == tensor.strides()
                                                    : back.is_contiguous());
  EXPECT_FALSE(back.is_view());
  EXPECT_EQ(back.device(), tensor.device());
}

TEST(TensorObject, ComesBackWithItsTypeAndSizes) {
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kUInt16, at::kHalf,
                           at::kBFloat16, at::kFloat, at::kDouble, at::kBool, at::kComplexHalf,
                           at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn}) {
    expect_back(at::arange(6).to(at::kFloat).to(dtype).reshape({2, 3}));
  }
  expect_back(at::ones({}));
  expect_back(at::empty({0}));
  expect_back(at::empty({3, 0, 2}, at::kInt));
  EXPECT_FALSE(decode<at::Tensor>(encode(at::Tensor())).defined());
}

TEST(TensorObject, KeepsItsStridesUnlessItHasGaps) {
  const auto grid = at::arange(12, at::kFloat).reshape({3, 4});
  expect_back(grid.t());
  EXPECT_EQ(decode<at::Tensor>(encode(grid.t())).stride(0), 1);
  const auto image =
      at::arange(2 * 3 * 4 * 5, at::kFloat).reshape({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  expect_back(image);
  expect_back(image.permute({3, 1, 0, 2}));
  EXPECT_TRUE(decode<at::Tensor>(encode(image)).is_contiguous(at::MemoryFormat::ChannelsLast));
  expect_back(grid.slice(1, 1, 4, 2));
  expect_back(grid.select(0, 1).expand({5, 4}));
  const auto complex = at::complex(grid, grid.neg());
  expect_back(complex.conj());
  EXPECT_TRUE(at::equal(decode<at::Tensor>(encode(complex.conj())), complex.conj().resolve_conj()));
}

TEST(TensorObject, ArrivesAsALeafThatKeepsRequiresGrad) {
  const auto leaf = at::ones({2}).set_requires_grad(true);
  const auto back = decode<at::Tensor>(encode(leaf * 2));
  EXPECT_TRUE(back.requires_grad());
  EXPECT_TRUE(back.is_leaf());
  EXPECT_FALSE(decode<at::Tensor>(encode(at::ones({2}))).requires_grad());
  auto first = at::ones({2});
  auto second = decode<at::Tensor>(encode(first));
  second.add_(1);
  EXPECT_TRUE(at::equal(first, at::ones({2}))) << "memory of its own";
}

TEST(TensorObject, CanBeInsideStructsContainersAndObjects) {
  const Checkpoint sent{.epoch = 3, .weights = {{"w", at::arange(4, at::kFloat)}, {"none", {}}}};
  const auto back = decode<Checkpoint>(encode(sent));
  EXPECT_EQ(back.epoch, 3);
  EXPECT_TRUE(at::equal(back.weights.at("w"), sent.weights.at("w")));
  EXPECT_FALSE(back.weights.at("none").defined());

  const std::vector<Object> list = {Object(at::ones({2, 2})), Object("text")};
  const auto objects = decode<std::vector<Object>>(encode(list));
  EXPECT_TRUE(at::equal(objects[0].as<at::Tensor>(), at::ones({2, 2})));
  EXPECT_EQ(objects[0].type(), "tensor");
  EXPECT_EQ(refusal([&] { objects[1].as<at::Tensor>(); }).message, "at the top: expected tensor, got text");
}

TEST(TensorObject, OfAnyLayoutIsReceivedInsideAnObject) {
  const auto image = at::arange(2 * 3 * 4 * 5, at::kFloat).reshape({2, 3, 4, 5});
  const std::vector<at::Tensor> layouts = {image, image.transpose(0, 3),
                                           image.contiguous(at::MemoryFormat::ChannelsLast),
                                           image.to_sparse(), image.slice(3, 1, 5, 2)};
  for (const auto& tensor : layouts) {
    // Followed by another value: what is skipped ends where it should.
    const std::vector<Object> sent = {Object(tensor), Object(7)};
    const auto received = decode<std::vector<Object>>(encode(sent));
    EXPECT_EQ(received, sent);
    const auto back = received[0].as<at::Tensor>();
    EXPECT_TRUE(at::equal(back.to_dense(), tensor.to_dense()));
    const bool without_gaps = !tensor.is_sparse() && tensor.is_non_overlapping_and_dense();
    EXPECT_TRUE(!without_gaps || back.strides() == tensor.strides());
    EXPECT_EQ(received[1].as<int>(), 7);
  }
}

TEST(TensorObject, TravelsBesideTheObjectWhenAsked) {
  const Checkpoint sent{.epoch = 1, .weights = {{"a", at::arange(1000)}, {"b", at::ones({3, 3}).t()}}};
  object::Blobs blobs;
  const Bytes bytes = encode(sent, blobs);
  ASSERT_EQ(blobs.size(), 2u);
  EXPECT_EQ(blobs[0].bytes.data(), sent.weights.at("a").const_data_ptr()) << "not copied";
  EXPECT_LT(bytes.size(), 300u);
  const auto back = decode<Checkpoint>(bytes, blobs);
  EXPECT_TRUE(at::equal(back.weights.at("a"), sent.weights.at("a")));
  EXPECT_TRUE(at::equal(back.weights.at("b"), sent.weights.at("b")));

  EXPECT_NE(refusal([&] { decode<Checkpoint>(bytes); }).message.find("2 blobs beside it, 0 came"),
            std::string::npos);
  std::swap(blobs[0], blobs[1]);
  EXPECT_NE(
      refusal([&] { decode<Checkpoint>(bytes, blobs); }).message.find("at .weights[0]: blob 0 should have"),
      std::string::npos);
}

TEST(TensorObject, IsAViewOfTheBytesThatArrivedWithIt) {
  const auto sent = at::arange(1000, at::kFloat).reshape({10, 100});
  object::Blobs blobs;
  const Bytes bytes = encode(std::vector{sent, at::ones({3})}, blobs);
  std::weak_ptr<const void> watch;
  at::Tensor back;
  {
    object::Blobs arrived;
    for (const auto& blob : blobs) {
      auto copy = std::make_shared<const Bytes>(blob.bytes.begin(), blob.bytes.end());
      const std::span<const std::uint8_t> view = *copy;
      arrived.push_back({.owner = std::move(copy), .bytes = view, .yours = true});
    }
    watch = arrived[0].owner;
    const std::weak_ptr<const void> small = arrived[1].owner;
    const auto list = decode<std::vector<at::Tensor>>(bytes, arrived);
    back = list[0];
    EXPECT_EQ(back.const_data_ptr(), arrived[0].bytes.data()) << "not copied";
    arrived.clear();
    EXPECT_TRUE(small.expired()) << "what is small is copied";
    EXPECT_TRUE(at::equal(list[1], at::ones({3})));
  }
  EXPECT_FALSE(watch.expired());
  EXPECT_TRUE(at::equal(back, sent));
  back.add_(1);
  back.reset();
  EXPECT_TRUE(watch.expired()) << "let go of with the tensor";
  EXPECT_TRUE(at::equal(sent[0][0], at::zeros({})));
}

TEST(TensorObject, ThatIsSparseStaysSo) {
  const auto indices = at::arange(6).reshape({2, 3}).remainder(4);
  const auto values = at::arange(6, at::kDouble).reshape({3, 2});
  const auto loose = at::sparse_coo_tensor(indices, values, {4, 6, 2});
  for (const auto& sparse :
       {loose, loose.coalesce(), at::zeros({3, 0}).to_sparse(), at::zeros({5}).to_sparse()}) {
    const auto back = decode<at::Tensor>(encode(sparse));
    EXPECT_TRUE(back.is_sparse());
    EXPECT_EQ(back.is_coalesced(), sparse.is_coalesced());
    EXPECT_EQ(back.sizes(), sparse.sizes());
    EXPECT_TRUE(at::equal(back._indices(), sparse._indices()));
    EXPECT_TRUE(at::equal(back._values(), sparse._values()));
  }
  const Object kept(loose);
  EXPECT_TRUE(at::equal(decode<std::vector<Object>>(encode(std::vector{kept}))[0].as<at::Tensor>().to_dense(),
                        loose.to_dense()));
}

// Keeps what passes.
struct Watcher final : object::TensorScope {
  void on_write(const at::Tensor& tensor) override { written.push_back(tensor); }
  void on_read(at::Tensor& tensor) override { read.push_back(tensor); }
  std::vector<at::Tensor> written, read;
};

TEST(TensorObject, ThatRequiresGradientsIsShownToTheScope) {
  const auto leaf = at::ones({2}).set_requires_grad(true);
  const std::vector<at::Tensor> list = {at::ones({2}), leaf * 2, {}, leaf};
  Watcher watcher;
  Bytes bytes;
  {
    const object::TensorScope::Use use(&watcher);
    bytes = encode(list);
    ASSERT_EQ(watcher.written.size(), 2u);
    EXPECT_TRUE(watcher.written[0].is_same(list[1]));
    EXPECT_TRUE(watcher.written[1].is_same(leaf));
    const auto back = decode<std::vector<at::Tensor>>(bytes);
    ASSERT_EQ(watcher.read.size(), 2u);
    EXPECT_TRUE(watcher.read[1].is_same(back[3]));
    EXPECT_FALSE(back[3].requires_grad()) << "the scope decides";
  }
  EXPECT_TRUE(decode<std::vector<at::Tensor>>(bytes)[3].requires_grad());
  EXPECT_EQ(watcher.read.size(), 2u);
}

TEST(TensorObject, IsRefusedWhenItIsNotNumbersInAKnownLayout) {
  const auto rows = at::ones({2, 2}).to_sparse_csr();
  const auto meta = at::empty({2}, at::TensorOptions().device(at::kMeta));
  for (const auto& tensor : {rows, meta}) {
    const auto failure = refusal([&] { encode(tensor); });
    EXPECT_EQ(failure.kind, ErrorKind::kUnsupported) << failure.message;
    EXPECT_NE(failure.message.find("cannot be sent inside an object"), std::string::npos);
  }
}

// What follows the code: dtype, device type, device index, flags, n, sizes.
constexpr std::size_t kAt = 9;

TEST(TensorObject, OfAMissingDeviceIsRejectedWithAReason) {
  Bytes bytes = encode(at::ones({2}));
  bytes[kAt + 1] = static_cast<std::uint8_t>(c10::DeviceType::CUDA);
  bytes[kAt + 2] = 3;
  const auto failure = refusal([&] { decode<at::Tensor>(bytes); });
  EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
  EXPECT_EQ(
      failure.message,
      "at the top: this tensor was on cuda:3, which this process does not have; move it to the CPU before "
      "sending it");
}

TEST(TensorObject, RefusesSizesThatItsBytesDoNotFill) {
  const Bytes whole = encode(at::ones({2, 2}));
  const auto with = [&](std::size_t at, std::int64_t value) {
    Bytes bytes = whole;
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return refusal([&] { decode<at::Tensor>(bytes); }).message;
  };
  EXPECT_EQ(with(kAt + 8, 3), "at the top: 16 bytes arrived for 6 elements of Float");
  EXPECT_EQ(with(kAt + 8, -1), "at the top: no tensor has these sizes; the object is damaged");
  EXPECT_EQ(with(kAt + 8, std::int64_t{1} << 62),
            "at the top: no tensor has these sizes; the object is damaged");
  Bytes empty = encode(at::empty({0, 1, 1}));
  const std::int64_t huge = std::int64_t{1} << 62;
  std::memcpy(empty.data() + kAt + 16, &huge, sizeof huge);
  std::memcpy(empty.data() + kAt + 24, &huge, sizeof huge);
  EXPECT_EQ(refusal([&] { decode<at::Tensor>(empty); }).message,
            "at the top: no tensor has these sizes; the object is damaged")
      << "strides would overflow";
}

TEST(TensorObject, OfWhichAnyByteWasChangedIsRefusedOrWhole) {
  at::set_num_threads(1);  // thousands of tiny tensors: a team of threads on busy cores takes minutes
  const auto sparse = at::eye(2).to_sparse();
  for (const auto& tensor : {at::ones({2, 2}), at::ones({3}, at::kBool), at::zeros({0, 2}, at::kInt),
                             at::ones({2, 3}).t(), sparse}) {
    const Bytes whole = encode(tensor);
    for (std::size_t n = 0; n < whole.size(); ++n)
      EXPECT_THROW(decode<at::Tensor>(std::span(whole).first(n)), Error);
    for (std::size_t at = 8; at < whole.size(); ++at) {
      for (int value = 0; value < 256; ++value) {
        Bytes bytes = whole;
        bytes[at] = static_cast<std::uint8_t>(value);
        try {
          const auto back = decode<at::Tensor>(bytes);
          if (back.defined() && back.is_sparse()) {
            EXPECT_LE(back._values().nbytes(), whole.size());
            // Would reach outside with a bad index; dense only where that is small.
            if (back.numel() < 1000 && back.scalar_type() == at::kFloat) {
              EXPECT_EQ(back.to_dense().sizes(), back.sizes());
            }
          } else {
            EXPECT_LE(back.defined() ? back.nbytes() : 0, whole.size());
          }
        } catch (const Error& error) {
          EXPECT_TRUE(error.kind() == ErrorKind::kUsage || error.kind() == ErrorKind::kUnsupported)
              << error.what();
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
