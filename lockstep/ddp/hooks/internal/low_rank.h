// The mathematics of PowerSGD, without communication. Private to hooks/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <random>

namespace lockstep::internal {

struct MatrixShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  friend bool operator==(const MatrixShape&, const MatrixShape&) = default;
  friend auto operator<=>(const MatrixShape&, const MatrixShape&) = default;
};

// A dense gradient as a real matrix in memory order: its outermost dimension (the first, unless the strides
// differ) by all others.
MatrixShape matrix_shape(const at::Tensor& gradient);
// (rows + columns) * rank * min_rate < rows * columns.
bool worth_compressing(MatrixShape shape, std::int64_t rank, double min_rate);

// Makes the columns of each matrix of [batch, rows, columns] orthonormal, in place: Gram-Schmidt for at most
// two columns and for half types (in f32), QR for others. With Gram-Schmidt `epsilon` is added to the norms,
// and a column that is zero or a linear combination of earlier ones becomes zero.
void orthogonalise(const at::Tensor& matrices, double epsilon);

// Zero columns: the power method never leaves them.
bool has_dead_columns(const at::Tensor& matrices);
void replace_dead_columns(const at::Tensor& matrices, const at::Tensor& by);

// Seeds for the random matrices, the same on all ranks: integers below 10^9, as numpy's
// RandomState(seed).randint draws them, so that a run can be compared with torch's.
class SeedSequence {
 public:
  explicit SeedSequence(std::uint32_t seed) : engine_(seed) {}
  std::uint64_t next();
  // Numbers drawn so far; skip(n_drawn()) brings a new sequence to the same position.
  std::uint64_t n_drawn() const { return n_drawn_; }
  void skip(std::uint64_t n);

 private:
  std::mt19937 engine_;
  std::uint64_t n_drawn_ = 0;
};

}  // namespace lockstep::internal
