#include "lockstep/ddp/internal/gradient_pool.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/graph_task.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"

namespace lockstep::internal {
namespace {

// Blocks beyond one per gradient: autograd may hold a new gradient while the old one is still there.
constexpr std::size_t kSpare = 2;

// What the pass on this thread may allocate from; over when no pass runs. Owned, but without a destructor:
// threads allocate while they end.
thread_local std::shared_ptr<GradientPool>* opened = nullptr;

// A pool's own memory is made by libtorch, too.
class Pause {
 public:
  Pause() : opened_(std::exchange(opened, nullptr)) {}
  ~Pause() { opened = opened_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  std::shared_ptr<GradientPool>* const opened_;
};

void shut() noexcept {
  delete std::exchange(opened, nullptr);
}

}  // namespace

// Process-wide, since libtorch has one allocator per device type. Never destroyed: tensors may outlive main.
class PoolAllocator final : public c10::Allocator {
 public:
  // Installed once and never removed: memory that it gave out may be released at any time, through its
  // deleter.
  static PoolAllocator& placed() {
    static PoolAllocator* const only = new PoolAllocator(c10::GetCPUAllocator());
    static const bool done = [] {
      c10::SetCPUAllocator(only);
      return true;
    }();
    static_cast<void>(done);
    return *only;
  }

  c10::DataPtr allocate(std::size_t n_bytes) override {
    if (opened != nullptr && n_bytes >= (*opened)->smallest_) {
      if (void* const data = from_pool(n_bytes); data != nullptr)
        return {data, data, &PoolAllocator::release, c10::Device(c10::kCPU)};
    }
    return before_->allocate(n_bytes);
  }
  // Of both kinds of memory.
  c10::DeleterFnPtr raw_deleter() const override {
    return before_->raw_deleter() == nullptr ? nullptr : &PoolAllocator::release;
  }
  void copy_data(void* to, const void* from, std::size_t n_bytes) const override {
    before_->copy_data(to, from, n_bytes);
  }

  // Of both kinds of memory: whoever uses raw_deleter() does not know which it has. The block is returned
  // outside the lock.
  static void release(void* data) {
    PoolAllocator& self = placed();
    Lent lent;
    {
      const std::lock_guard lock(self.mutex_);
      const auto found = self.lent_.find(data);
      if (found != self.lent_.end()) {
        lent = std::move(found->second);
        self.lent_.erase(found);
      }
    }
    if (lent.block.memory.defined()) {
      // Else the pool was destroyed with its model, and the block returns to the group.
      if (const auto pool = lent.pool.lock()) pool->give_back(std::move(lent.block));
    } else if (data != nullptr) {
      self.before_->raw_deleter()(data);
    }
  }
  void lend(void* data, const std::shared_ptr<GradientPool>& pool, GradientPool::Block block) {
    const std::lock_guard lock(mutex_);
    lent_[data] = {pool, std::move(block)};
  }
  bool lent_by(const void* data, const GradientPool* pool) {
    const std::lock_guard lock(mutex_);
    const auto found = lent_.find(data);
    return found != lent_.end() && found->second.pool.lock().get() == pool;
  }

 private:
  struct Lent {
    std::weak_ptr<GradientPool>
        pool;  // weakly: one gradient that is kept must not keep the blocks of all others
    GradientPool::Block block;
  };
  explicit PoolAllocator(c10::Allocator* before) : before_(before) {}

  static void* from_pool(std::size_t n_bytes) {
    if (torch::autograd::get_current_graph_task_id() == -1) {  // the pass is over
      shut();
      return nullptr;
    }
    return (*opened)->take(n_bytes);
  }

  c10::Allocator* const before_;
  std::mutex mutex_;
  std::unordered_map<const void*, Lent> lent_;  // guarded by mutex_
};

std::shared_ptr<GradientPool> GradientPool::create(Group group, const std::vector<std::size_t>& sizes,
                                                   c10::Device device) {
  return std::shared_ptr<GradientPool>(new GradientPool(std::move(group), sizes, device));
}

GradientPool::GradientPool(Group group, const std::vector<std::size_t>& sizes, c10::Device device)
    : group_(std::move(group)),
      device_(device),
      process_(::getpid()),
      smallest_(*std::min_element(sizes.begin(), sizes.end())) {
  if (!device_.is_cpu()) return;  // no sizes: nothing is ever taken
  for (const std::size_t n_bytes : sizes) ++sizes_.try_emplace(n_bytes, Size{kSpare}).first->second.n_most;
  PoolAllocator::placed();
}

// Per thread: only allocations of the thread that runs backward() come from the pool, and only until the
// graph task is over.
void GradientPool::open() {
  if (!device_.is_cpu()) return;
  shut();
  if (process_ == ::getpid()) opened = new std::shared_ptr<GradientPool>(shared_from_this());
}

void GradientPool::close() noexcept {
  if (opened != nullptr && opened->get() == this) shut();
}

// Exact sizes only: a block of another size could not be reduced in place as the whole gradient. n_made
// bounds what a pass can hold; when it is reached, ordinary memory is used.
void* GradientPool::take(std::size_t n_bytes) {
  Block block;
  {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(n_bytes);
    if (found == sizes_.end()) return nullptr;
    Size& size = found->second;
    if (!size.free.empty()) {
      block = std::move(size.free.back());
      size.free.pop_back();
    } else if (size.n_made < size.n_most) {
      ++size.n_made;
    } else {
      return nullptr;
    }
  }
  if (!block.memory.defined()) {
    try {
      const Pause pause;
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      block = {empty_shared({static_cast<std::int64_t>(n_bytes)}, at::kByte, {.group = group_}), n_bytes};
    } catch (const Error&) {  // ordinary memory will do, and n_made says not to ask again
      return nullptr;
    }
  }
  void* const data = block.memory.mutable_data_ptr();
  PoolAllocator::placed().lend(data, shared_from_this(), std::move(block));
  return data;
}

void GradientPool::give_back(Block block) {
  const std::lock_guard lock(mutex_);
  sizes_.at(block.n_bytes).free.push_back(std::move(block));
}

at::Tensor GradientPool::make(const at::Tensor& like) {
  const auto options = like.options().requires_grad(false);
  if (void* const data = take(like.nbytes()); data != nullptr) {
    return at::from_blob(
        data, like.sizes(), like.strides(), [](void* memory) { PoolAllocator::release(memory); }, options);
  }
  const Pause pause;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::empty_strided(like.sizes(), like.strides(), options);  // engines reduce it, too, a little slower
}

std::size_t GradientPool::free_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [n_bytes, size] : sizes_) sum += n_bytes * size.free.size();
  return sum;
}

bool GradientPool::holds(const at::Tensor& gradient, const at::Tensor& parameter) const {
  const c10::Storage& storage = gradient.storage();
  return gradient.storage_offset() == 0 && storage.nbytes() == gradient.nbytes() && !gradient.is_neg() &&
         gradient.strides() == parameter.strides() && gradient.is_non_overlapping_and_dense() &&
         (!device_.is_cpu() || PoolAllocator::placed().lent_by(storage.data(), this));
}

bool GradientPool::holds_whole(const at::Tensor& gradient, const at::Tensor& parameter,
                               const at::Tensor& incoming) const {
  if (!holds(gradient, parameter)) return false;
  const c10::Storage& storage = gradient.storage();
  // Who refers to the memory: the gradient, what it was taken from, and what these are views of. Any of the
  // latter may in turn be on its way to another node of the graph.
  std::set<const c10::TensorImpl*> known;
  std::map<const c10::TensorImpl*, std::size_t> views_of;
  for (const at::TensorBase* const tensor :
       {static_cast<const at::TensorBase*>(&gradient), static_cast<const at::TensorBase*>(&incoming)}) {
    if (!tensor->defined() || !tensor->storage().is_alias_of(storage)) continue;
    if (!known.insert(tensor->unsafeGetTensorImpl()).second || !tensor->is_view()) continue;
    const at::TensorBase& base = tensor->_base();
    if (base.use_count() > ++views_of[base.unsafeGetTensorImpl()]) return false;
  }
  return storage.use_count() <= known.size() + views_of.size();
}

}  // namespace lockstep::internal
