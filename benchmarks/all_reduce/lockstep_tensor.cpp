// lockstep::all_reduce on tensors, as users call it. place=zero_copy: tensors from empty_shared; place=staged: ordinary
// ones.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <map>
#include <vector>

#include "benchmarks/all_reduce/measure.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/join_world.h"
#include "benchmarks/common/serve.h"
#include "lockstep/group/group.h"

namespace bench {
namespace {

class LockstepTensor {
 public:
  void prepare(const std::string& place, std::size_t n_bytes, std::size_t n_buffers) {
    current_ = &places_[place];
    const auto n = static_cast<std::int64_t>(n_bytes / sizeof(float));
    if (current_->size() == n_buffers && current_->front().numel() == n) return;
    current_->clear();
    for (std::size_t i = 0; i < n_buffers; ++i) {
      current_->push_back(place == "zero_copy" ? lockstep::empty_shared({n}) : at::empty({n}));
    }
  }

  std::span<float> buffer(std::size_t i) {
    const at::Tensor& tensor = (*current_)[i];
    return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
  }

  void all_reduce(std::size_t i) { lockstep::all_reduce((*current_)[i]); }

 private:
  std::map<std::string, std::vector<at::Tensor>> places_;  // the last size of each place stays between rounds
  std::vector<at::Tensor>* current_ = nullptr;
};

}  // namespace
}  // namespace bench

int main() {
  const auto link = bench::fork_ranks(2);
  bench::bind_to_core(link->rank());
  at::set_num_threads(1);
  bench::join_world(*link);
  int code = 0;
  {
    bench::LockstepTensor tensors;
    code = bench::serve(*link, [&](const bench::Request& request) {
      return bench::measure_all_reduce(tensors, *link, request);
    });
  }
  lockstep::destroy_process_group();
  return code;
}
