// lockstep::all_reduce and barrier, as users call them. place=zero_copy: tensors from empty_shared;
// place=staged: ordinary ones. Started with backend=<name> address=<of rank 0> namespaces=<a,b>, the ranks
// are on hosts of their own.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <map>
#include <vector>

#include "benchmarks/collective/measure.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/join_world.h"
#include "benchmarks/common/place_rank.h"
#include "benchmarks/common/serve.h"
#include "lockstep/collective/collective.h"

namespace bench {
namespace {

class LockstepTensor {
 public:
  bool prepare(const Case& which) {
    if (which.kind != Kind::kAllReduce && which.kind != Kind::kBarrier) refuse(which);
    which_ = which;
    current_ = &places_[which.place];
    const auto n = static_cast<std::int64_t>(which.n_whole());
    if (current_->size() == which.n_buffers && current_->front().numel() == n) return false;
    current_->clear();
    for (std::size_t i = 0; i < which.n_buffers; ++i) {
      current_->push_back(which.place == "zero_copy" ? lockstep::empty_shared({n}) : at::empty({n}));
    }
    return true;
  }

  std::span<float> send(std::size_t i) {
    const at::Tensor& tensor = (*current_)[i];
    return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
  }
  std::span<float> recv(std::size_t i) { return send(i); }

  void run(std::size_t i) {
    if (which_.kind == Kind::kBarrier) return barrier();
    lockstep::all_reduce((*current_)[i]);
  }
  void barrier() { lockstep::barrier(); }

 private:
  Case which_;
  std::map<std::string, std::vector<at::Tensor>> places_;  // the last size of each place stays between rounds
  std::vector<at::Tensor>* current_ = nullptr;
};

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  const bench::Request arguments = bench::arguments(argc, argv);
  const auto link = bench::fork_ranks(static_cast<int>(arguments.number("ranks")));
  at::set_num_threads(1);
  const bench::JoinOptions join{.address = arguments.text("address", "127.0.0.1"),
                                .backend = arguments.text("backend", "")};
  const int joined = bench::guarded(*link, [&] {
    bench::place_rank(arguments, *link);
    bench::join_world(*link, join);
    return 0;
  });
  if (joined != 0) return joined;
  int code = 0;
  {
    bench::LockstepTensor tensors;
    code = bench::serve(
        *link, [&](const bench::Request& request) { return bench::measure(tensors, *link, request); });
  }
  lockstep::destroy_process_group();
  return code;
}
