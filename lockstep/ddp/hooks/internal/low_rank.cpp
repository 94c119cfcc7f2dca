#include "lockstep/ddp/hooks/internal/low_rank.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/where.h>

namespace lockstep::internal {
namespace {

constexpr std::int64_t kGramSchmidtColumns = 2;
constexpr std::uint32_t kSeedBound = 1'000'000'000;
constexpr std::uint32_t kSeedMask = (1U << 30) - 1;  // the least mask that covers the bound

at::Tensor norms(const at::Tensor& columns) {
  return at::linalg_vector_norm(columns, 2, at::IntArrayRef{1}, /*keepdim=*/true);
}

// What is left of a column after earlier ones were taken off is noise when it is this small a part of it.
// Normalised, it would point anywhere, back along the earlier ones, too.
double noise_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 4e-3 : 3e-2;
}

void gram_schmidt(const at::Tensor& matrices, double epsilon, double noise) {
  const std::int64_t n_columns = matrices.size(2);
  const at::Tensor smallest = norms(matrices).mul_(noise);
  for (std::int64_t i = 0; i < n_columns; ++i) {
    const at::Tensor column = matrices.narrow(2, i, 1);
    // Twice is enough: the second time takes off what rounding left.
    for (int time = 0; time < 2 && i != 0; ++time) {
      const at::Tensor earlier = matrices.narrow(2, 0, i);
      column.sub_(at::bmm(earlier, at::bmm(earlier.transpose(1, 2), column)));
    }
    at::Tensor norm = norms(column);
    const at::Tensor dead = norm.le(smallest.narrow(2, i, 1));  // not NaN
    column.div_(norm.add_(epsilon).masked_fill_(dead, 1)).masked_fill_(dead, 0);
  }
}

}  // namespace

MatrixShape matrix_shape(const at::Tensor& gradient) {
  const std::int64_t n = gradient.numel() * (gradient.is_complex() ? 2 : 1);
  if (gradient.dim() == 0 || n == 0) return {.rows = n, .columns = 1};
  std::int64_t outermost = 0;
  for (std::int64_t d = 1; d < gradient.dim(); ++d) {
    if (gradient.size(d) > 1 && gradient.stride(d) > gradient.stride(outermost)) outermost = d;
  }
  return {.rows = gradient.size(outermost), .columns = n / gradient.size(outermost)};
}

bool worth_compressing(MatrixShape shape, std::int64_t rank, double min_rate) {
  return static_cast<double>((shape.rows + shape.columns) * rank) * min_rate <
         static_cast<double>(shape.rows * shape.columns);
}

void orthogonalise(const at::Tensor& matrices, double epsilon) {
  const at::ScalarType dtype = matrices.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  if (half) {
    const at::Tensor wide = matrices.to(at::kFloat);
    gram_schmidt(wide, epsilon, noise_of(dtype));
    matrices.copy_(wide);
  } else if (matrices.size(2) <= kGramSchmidtColumns) {
    gram_schmidt(matrices, epsilon, noise_of(dtype));
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices, "reduced")));
  }
}

bool has_dead_columns(const at::Tensor& matrices) {
  return norms(matrices).eq(0).any().item<bool>();
}

void replace_dead_columns(const at::Tensor& matrices, const at::Tensor& by) {
  matrices.copy_(at::where(norms(matrices).eq(0), by, matrices));
}

std::uint64_t SeedSequence::next() {
  for (;;) {
    ++n_drawn_;
    const std::uint32_t number = static_cast<std::uint32_t>(engine_()) & kSeedMask;
    if (number < kSeedBound) return number;
  }
}

void SeedSequence::skip(std::uint64_t n) {
  engine_.discard(n);
  n_drawn_ += n;
}

}  // namespace lockstep::internal
