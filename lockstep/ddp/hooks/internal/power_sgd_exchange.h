// The two exchanges of PowerSGD for one bucket. Private to hooks/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/ddp/hooks/internal/low_rank.h"
#include "lockstep/ddp/hooks/power_sgd.h"
#include "lockstep/group/work.h"

namespace lockstep::internal {

// Created and driven by the thread that runs backward(); the last step, decompress, runs on the thread that
// completes the second exchange. Keeps the state alive until then.
class PowerSGDExchange : public std::enable_shared_from_this<PowerSGDExchange> {
 public:
  // Decides what is compressed and updates the statistics.
  PowerSGDExchange(std::shared_ptr<PowerSGDState> state, GradBucket& bucket, PowerSGDState::Form form);

  std::size_t bucket() const { return bucket_; }
  // Nothing is compressed: the bucket is only averaged.
  bool is_plain() const { return matrices_.empty(); }
  // Resolves to the bucket's buffer.
  const GradFuture& future() const { return future_; }

  // Adds the error of earlier steps and starts the first exchange: P followed by the uncompressed elements.
  void start();
  // Waits for it and starts the second: Q. An error also fails the future.
  void advance();
  // It will never be advanced.
  void abandon(const std::string& why);

 private:
  // Uncompressed elements of whole_.
  struct Stretch {
    std::int64_t at, n;
  };
  // Matrices of one shape, multiplied together.
  struct Batch {
    MatrixShape shape;
    std::int64_t rank = 0;
    std::vector<std::int64_t> at{};  // offset of each in whole_
    at::Tensor m{}, p{}, q{};        // [batch, rows, columns], [batch, rows, rank], [batch, columns, rank]
  };

  void lay_out(const GradBucket& bucket);
  void lay_out_square();
  void add_matrix(MatrixShape shape, std::int64_t rank, std::int64_t at);
  void count() const;
  void add_error();
  void make_room();
  void draw(bool fresh);
  void decompress();
  at::Tensor slice(const at::Tensor& flat, const Batch& batch, std::size_t i) const;

  const std::shared_ptr<PowerSGDState> state_;
  PowerSGDState::Memory& memory_;  // the state's
  const std::size_t bucket_;
  const at::Tensor buffer_;
  at::Tensor whole_;  // what is split into matrices: the buffer, or a larger one padded with zeros
  std::vector<Batch> matrices_;
  std::vector<Stretch> plain_;
  std::int64_t n_p_ = 0, n_q_ = 0, n_plain_ = 0;  // elements
  Work work_;                                     // the first exchange
  GradFuture future_;
};

}  // namespace lockstep::internal
