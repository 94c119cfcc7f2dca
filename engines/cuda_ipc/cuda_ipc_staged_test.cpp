// The order between operations and streams when memory cannot be exported, as with expandable segments: it is staged.
#include "engines/cuda_ipc/contract_testing.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace lockstep::comm {
namespace {

class Unexportable final : public testing::TestMemory {
 public:
  Unexportable(int rank, int size) : memory_(cuda::test_memory(rank, size)) {}
  lockstep_device_kind device_kind() const override { return memory_->device_kind(); }
  int device() const override { return memory_->device(); }
  void* stream() override { return memory_->stream(); }
  void* allocate(std::size_t n_bytes) override {
    void* const memory = memory_->allocate(n_bytes);
    fake_cuda_make_unexportable(memory);
    return memory;
  }
  void free(void* memory, std::size_t n_bytes) noexcept override { memory_->free(memory, n_bytes); }
  void copy_in(void* to, const void* from, std::size_t n_bytes) override {
    memory_->copy_in(to, from, n_bytes);
  }
  void copy_out(void* to, const void* from, std::size_t n_bytes) override {
    memory_->copy_out(to, from, n_bytes);
  }
  void* new_stream() override { return memory_->new_stream(); }
  void enqueue_copy(void* to, const void* from, std::size_t n_bytes, void* stream) override {
    memory_->enqueue_copy(to, from, n_bytes, stream);
  }
  void enqueue_call(void (*function)(void*), void* context, void* stream) override {
    memory_->enqueue_call(function, context, stream);
  }
  void synchronize(void* stream) override { memory_->synchronize(stream); }
  bool idle(void* stream) override { return memory_->idle(stream); }

 private:
  const std::unique_ptr<testing::TestMemory> memory_;
};

INSTANTIATE_TEST_SUITE_P(CudaIpcStaged, EngineDeviceContract,
                         ::testing::Values(EngineKind{
                             .name = "processes",
                             .table = cuda_ipc::plugin_table,
                             .ranks = EngineKind::Ranks::kProcesses,
                             .sizes = {3},
                             .rank_order = true,
                             .everything = true,
                             .memory = [](int rank,
                                          int size) { return std::make_unique<Unexportable>(rank, size); },
                             .run_awaits_streams = true}),
                         kind_name);
// Collectives and messages of every kind too; its other tests need not run twice.
INSTANTIATE_TEST_SUITE_P(
    CudaIpcStagedLong, EngineContract,
    ::testing::ValuesIn(
        long_testing::enabled()
            ? std::vector<EngineKind>{EngineKind{
                  .name = "processes",
                  .table = cuda_ipc::plugin_table,
                  .ranks = EngineKind::Ranks::kProcesses,
                  .sizes = {3},
                  .rank_order = true,
                  .everything = true,
                  .memory = [](int rank, int size) { return std::make_unique<Unexportable>(rank, size); }}}
            : std::vector<EngineKind>{}),
    kind_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EngineContract);

}  // namespace
}  // namespace lockstep::comm
