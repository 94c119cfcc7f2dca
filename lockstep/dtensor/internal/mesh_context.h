// What a sharded tensor needs of its mesh at every operator: groups, shape and this rank's coordinate, as
// plain vectors, and the layouts made so far. One per mesh and rank, shared by its tensors; found from a
// DeviceMesh by the groups it is made of, so that two slices mesh["tp"] have the same one. The rank comes
// from here and never from the current thread, since backward may run on another one. Thread safety: every
// method may be called from any thread.
#pragma once

#include <ATen/core/Generator.h>

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/dtensor/internal/result_pool.h"
#include "lockstep/dtensor/internal/shard_math.h"
#include "lockstep/dtensor/placement.h"
#include "lockstep/dtensor/redistribute_plan.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep::dtensor_internal {

class MeshContext;
struct Decision;

// A mesh and the placements on it. Interned: equal layouts of a context are one object, so that layouts are
// compared and hashed by address. Owned by the context.
struct Layout {
  const MeshContext* mesh = nullptr;
  Placements placements;
  bool has_partial = false;
  bool all_replicate = false;
};

// The arguments of an operator call on which its rule depends, and the rule's answer for them; see decide.h.
// Answers stay until the cache ends, so that each thread also keeps its recent ones, which it finds without
// the mutex.
class DecisionCache {
 public:
  DecisionCache();
  // Long enough for an operator of three tensors of four dimensions without memory of its own.
  using Key = c10::SmallVector<std::int64_t, 24>;
  // Null when there is none.
  const Decision* find(const Key& key) const;
  const Decision* add(Key key, std::unique_ptr<const Decision> decision);

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept;
  };
  const std::uint64_t id_;  // of no other cache of the process, also of none that has ended
  mutable std::mutex mutex_;
  std::unordered_map<Key, std::unique_ptr<const Decision>, Hash> entries_;  // guarded by mutex_
};

class MeshContext : public std::enable_shared_from_this<MeshContext> {
 public:
  explicit MeshContext(DeviceMesh mesh);
  ~MeshContext();

  // The context of `mesh`, made at the first call. kUsage when this rank is not in the mesh; the text names
  // the function and the placements that it was asked for.
  static std::shared_ptr<const MeshContext> of(const DeviceMesh& mesh, const char* function,
                                               const Placements& placements = {});

  const DeviceMesh& mesh() const { return mesh_; }
  // "cpu [2, 4] (dp, tp)"
  std::string describe() const;
  std::size_t ndim() const { return shape_.size(); }
  const Sizes& shape() const { return shape_; }
  const Sizes& coordinate() const { return coordinate_; }
  const Group& group(std::size_t mesh_dim) const { return groups_[mesh_dim]; }

  const Layout* layout(const Placements& placements) const;
  DecisionCache& decisions() const { return decisions_; }
  // Between two layouts of this context, for a tensor of these whole sizes; searched once. Lives as long as the
  // context.
  const std::vector<RedistributeStep>& plan(const Layout& from, const Layout& to, at::IntArrayRef sizes,
                                            std::size_t item_size) const;
  const ResultPool& results() const { return results_; }

  // The generator of random operators, which all ranks of the mesh advance alike. Undefined until set.
  at::Generator generator() const;
  void set_generator(at::Generator generator) const;

 private:
  const DeviceMesh mesh_;
  const std::vector<Group> groups_;
  Sizes shape_;
  Sizes coordinate_;
  mutable std::mutex mutex_;
  mutable std::deque<Layout> layouts_;  // guarded by mutex_; entries never move and never change
  mutable at::Generator generator_;     // guarded by mutex_
  mutable DecisionCache decisions_;
  // guarded by mutex_; entries never move and never change
  mutable std::map<Sizes, std::vector<RedistributeStep>> plans_;
  const ResultPool results_;
};

}  // namespace lockstep::dtensor_internal
