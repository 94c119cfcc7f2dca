#include "lockstep/dtensor/internal/mesh_context.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/decide.h"

namespace lockstep::dtensor_internal {
namespace {

// The contexts of the process, those of all rank threads. Few: one per mesh that a program makes tensors on.
struct Registry {
  // A seed outlives the tensors of its mesh and ends with the mesh's groups. Both guarded by mutex.
  struct Seed {
    std::vector<std::weak_ptr<ProcessGroup>> groups;
    at::Generator generator;
  };
  std::mutex mutex;
  std::vector<std::weak_ptr<const MeshContext>> contexts;
  std::vector<Seed> seeds;
};
Registry& registry() {
  static Registry* const registry = new Registry;  // meshes may be used by destructors of static objects
  return *registry;
}

bool is_of(const Registry::Seed& seed, const std::vector<Group>& groups) {
  return std::ranges::equal(seed.groups, groups,
                            [](const auto& weak, const auto& group) { return weak.lock() == group; });
}

std::string text_of(const DeviceMesh& mesh) {
  auto text = base::cat(mesh.device_type(), " ", at::IntArrayRef(mesh.shape()));
  std::string names;
  for (const auto& name : mesh.mesh_dim_names()) names += names.empty() ? name : ", " + name;
  return names.empty() ? text : text + " (" + names + ")";
}

bool same_groups(const MeshContext& context, const std::vector<Group>& groups) {
  if (context.ndim() != groups.size()) return false;
  for (std::size_t m = 0; m < groups.size(); ++m) {
    if (context.group(m) != groups[m]) return false;
  }
  return true;
}

std::atomic<std::uint64_t> n_caches{0};

// Keys and decisions are those of the cache, whose entries never move.
struct RecentDecision {
  std::uint64_t cache = 0;
  const DecisionCache::Key* key = nullptr;
  const Decision* decision = nullptr;
};
thread_local constinit std::array<RecentDecision, 256> recent_decisions{};

// Groups number their members by rank, the mesh numbers pieces by place: both must be the same order, or
// pieces would change places. Every rank of the mesh comes to the same verdict.
void check_order(const DeviceMesh& mesh, const char* function) {
  const auto ranks = mesh.mesh().contiguous();
  const auto* const rank = ranks.const_data_ptr<std::int64_t>();
  for (std::int64_t d = 0; d < ranks.dim(); ++d) {
    const auto stride = ranks.stride(d);
    bool ascends = true;
    for (std::int64_t i = 0; i < ranks.numel(); ++i) {
      if (i / stride % ranks.size(d) > 0) ascends = ascends && rank[i - stride] < rank[i];
    }
    if (ascends) continue;
    base::raise(ErrorKind::kUsage, base::cat(function, ": the ranks of the mesh, ", text_of(mesh),
                                             ", do not ascend along its dimension ", d,
                                             ", and sharded tensors need that; list them in order"));
  }
}

}  // namespace

DecisionCache::DecisionCache() : id_(++n_caches) {}

const Decision* DecisionCache::find(const Key& key) const {
  auto& recent = recent_decisions[Hash()(key) % recent_decisions.size()];
  // The cache with this id is alive, since it is this one, and with it the answer.
  if (recent.cache == id_ && *recent.key == key) return recent.decision;
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return nullptr;
  recent = {id_, &found->first, found->second.get()};
  return recent.decision;
}

const Decision* DecisionCache::add(Key key, std::unique_ptr<const Decision> decision) {
  const std::lock_guard lock(mutex_);
  // Another thread of this rank may have decided the same meanwhile; its answer is in use and stays.
  return entries_.try_emplace(std::move(key), std::move(decision)).first->second.get();
}

std::size_t DecisionCache::Hash::operator()(const Key& key) const noexcept {
  std::uint64_t hash = key.size();
  for (const auto word : key) {
    // 2^64 divided by the golden ratio; the shift brings high bits back to the low ones, by which buckets are
    // chosen.
    hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 32;
  }
  return hash;
}

MeshContext::MeshContext(DeviceMesh mesh)
    : mesh_(std::move(mesh)), groups_(mesh_.get_all_groups()), shape_(mesh_.shape()) {
  for (int m = 0; m < mesh_.ndim(); ++m) coordinate_.push_back(mesh_.get_local_rank(m));
}

MeshContext::~MeshContext() = default;

const std::vector<RedistributeStep>& MeshContext::plan(const Layout& from, const Layout& to,
                                                       at::IntArrayRef sizes, std::size_t item_size) const {
  auto key = sizes.vec();
  key.push_back(reinterpret_cast<std::int64_t>(&from));
  key.push_back(reinterpret_cast<std::int64_t>(&to));
  key.push_back(static_cast<std::int64_t>(item_size));
  const std::lock_guard lock(mutex_);
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  auto plan = plan_redistribute(sizes.vec(), static_cast<std::int64_t>(item_size), shape_, from.placements,
                                to.placements);
  return plans_.emplace(std::move(key), std::move(plan)).first->second;
}

std::string MeshContext::describe() const {
  return text_of(mesh_);
}

std::shared_ptr<const MeshContext> MeshContext::of(const DeviceMesh& mesh, const char* function,
                                                   const Placements& placements) {
  if (!mesh.get_coordinate()) {
    const auto layout = placements.empty() ? std::string() : " with " + to_string(placements);
    base::raise(ErrorKind::kUsage, base::cat(function, layout, ": rank ", mesh.get_rank(),
                                             " is not in the mesh, ", text_of(mesh),
                                             "; only its ranks make tensors on it. Leave the call out where "
                                             "mesh.get_coordinate() is empty"));
  }
  const auto groups = mesh.get_all_groups();
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  // Under the lock from here: two threads that make the first tensor of a mesh at the same time must get one
  // context, or their layouts would differ by address.
  std::erase_if(all.contexts, [](const auto& context) { return context.expired(); });
  for (const auto& weak : all.contexts) {
    auto context = weak.lock();
    if (context && same_groups(*context, groups) && context->mesh() == mesh) return context;
  }
  check_order(mesh, function);
  auto context = std::make_shared<const MeshContext>(mesh);
  // The last tensor of the mesh may have died, and its context with it, since the seed was set: the generator
  // continues where it was.
  for (const auto& seed : all.seeds) {
    if (is_of(seed, groups)) context->generator_ = seed.generator;
  }
  all.contexts.push_back(context);
  return context;
}

at::Generator MeshContext::generator() const {
  const std::lock_guard lock(mutex_);
  return generator_;
}
void MeshContext::set_generator(at::Generator generator) const {
  {
    const std::lock_guard lock(mutex_);
    generator_ = generator;
  }
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.seeds,
                [&](const auto& seed) { return seed.groups.front().expired() || is_of(seed, groups_); });
  all.seeds.push_back({{groups_.begin(), groups_.end()}, std::move(generator)});
}

// A linear search: a program has a handful of layouts per mesh. deque, so that addresses stay valid when one
// is added.
const Layout* MeshContext::layout(const Placements& placements) const {
  const std::lock_guard lock(mutex_);
  for (const auto& layout : layouts_) {
    if (layout.placements == placements) return &layout;
  }
  auto& layout = layouts_.emplace_back();
  layout.mesh = this;
  layout.placements = placements;
  layout.has_partial = std::ranges::any_of(placements, &Placement::is_partial);
  layout.all_replicate = std::ranges::all_of(placements, &Placement::is_replicate);
  return &layout;
}

}  // namespace lockstep::dtensor_internal
