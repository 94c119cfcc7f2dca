// The mathematics of PowerSGD, apart from communication. Private to hooks/.
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

// A dense gradient as a matrix in the order of its memory, reals: its outermost dimension (the first, unless strides say
// otherwise) by all others.
MatrixShape matrix_shape(const at::Tensor& gradient);
// (rows + columns) * rank * min_rate < rows * columns.
bool worth_compressing(MatrixShape shape, std::int64_t rank, double min_rate);

// Makes the columns of each matrix of [batch, rows, columns] orthonormal, in place: Gram-Schmidt for at most two columns
// and for half types (in f32), QR for others. With Gram-Schmidt `epsilon` is added to the norms columns are divided by,
// and a column that is nothing, or nothing but a combination of earlier ones, becomes zero.
void orthogonalise(const at::Tensor& matrices, double epsilon);

// A column of zeros: the power method never leaves it.
bool has_dead_columns(const at::Tensor& matrices);
void replace_dead_columns(const at::Tensor& matrices, const at::Tensor& by);

// Seeds for the random matrices, the same on all ranks: whole numbers below a thousand million, as numpy's
// RandomState(seed).randint draws them, so that a run can be compared with torch's.
class SeedSequence {
 public:
  explicit SeedSequence(std::uint32_t seed) : engine_(seed) {}
  std::uint64_t next();
  // Numbers taken from the generator; skip(n_drawn()) of a new sequence is where this one is.
  std::uint64_t n_drawn() const { return n_drawn_; }
  void skip(std::uint64_t n);

 private:
  std::mt19937 engine_;
  std::uint64_t n_drawn_ = 0;
};

}  // namespace lockstep::internal
