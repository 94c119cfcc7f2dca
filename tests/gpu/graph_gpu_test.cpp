// Collectives and a whole DDP step inside a CUDA graph, captured with the driver's own calls.
#include <dlfcn.h>

#include "tests/gpu/gpu_testing.h"

namespace lockstep {
namespace {

using namespace gpu_testing;

// The few entries of the driver that a capture needs; a program linked with libtorch_cuda has at::cuda::CUDAGraph.
struct Capture {
  template <class F>
  static F entry(const char* name) {
    static void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<F>(::dlsym(driver, name));
  }
  using Graph = void*;
  static void check(int result) {
    if (result != 0) throw std::runtime_error("CUDA error " + std::to_string(result));
  }

  explicit Capture(const c10::Stream& stream) : stream_(stream.native_handle()) {
    constexpr int kThreadLocal = 1;
    check(entry<int (*)(void*, int)>("cuStreamBeginCapture_v2")(stream_, kThreadLocal));
  }
  void end() {
    Graph graph = nullptr;
    check(entry<int (*)(void*, Graph*)>("cuStreamEndCapture")(stream_, &graph));
    check(entry<int (*)(Graph*, Graph, unsigned long long)>("cuGraphInstantiateWithFlags")(&exec_, graph, 0));
  }
  void replay() const { check(entry<int (*)(Graph, void*)>("cuGraphLaunch")(exec_, stream_)); }

 private:
  void* const stream_;
  Graph exec_ = nullptr;
};

class GraphGpu : public GpuTest {};

TEST_F(GraphGpu, ACapturedAllReduceIsReplayed) {
  auto x = torch::ones({1 << 16}, on_gpu());
  all_reduce(x);  // the engine has connected
  const auto stream = side_stream();
  const c10::StreamGuard guard(stream);
  synchronize();
  Capture capture(stream);
  x.mul_(2);
  try {
    all_reduce(x);
  } catch (const Error& error) {
    ASSERT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what();
    capture.end();
    GTEST_SKIP() << "the engine captures nothing: " << error.what();
  }
  x.add_(1);
  capture.end();
  x.fill_(rank() + 1);
  synchronize();
  barrier();
  double expected = 0, sum = 0;
  for (int r = 0; r < size(); ++r) sum += r + 1;
  // The first replay sums 2 (r + 1); from then on all ranks hold the same value.
  expected = 2 * sum + 1;
  capture.replay();
  for (int i = 1; i < 20; ++i) {
    capture.replay();
    expected = 2 * expected * size() + 1;
    if (expected > 1e6) break;
  }
  synchronize();
  EXPECT_TRUE(torch::all(x == static_cast<float>(expected)).item<bool>())
      << x[0].item<float>() << " " << expected;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::gpu_testing::run_all(argc, argv);
}
