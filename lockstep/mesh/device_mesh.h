// Ranks laid out in an n-dimensional array, with one group per dimension: the ranks that differ from this one
// in that coordinate only.
//
//   auto mesh = init_device_mesh("cpu", {2, 4}, {.mesh_dim_names = {"dp", "tp"}});
//   all_reduce(gradient, {.group = mesh.get_group("dp")});
//   auto tp = mesh["tp"];                            // the row of this rank, groups reused
//
// Creating a mesh is collective over its ranks: each makes the same calls in the same order; ranks of the
// world outside the mesh need not call. A dimension that spans the whole world uses the default group. Ranks
// inside a group are ascending, so a coordinate equals the rank in its group only where the mesh ascends
// along that dimension. A small value: copies share the mesh.
// Thread safety: as its groups; flatten must not run concurrently on one rank.
// Errors: kUsage, before anything is sent, when a requirement stated below is violated; those of new_group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {
namespace internal {
struct MeshView;  // device_mesh.cpp
}

// A dimension by number (negative from the end) or by name.
class MeshDim {
 public:
  MeshDim(int number) : dim_(number) {}
  MeshDim(std::string name) : dim_(std::move(name)) {}
  MeshDim(const char* name) : dim_(std::string(name)) {}
  const std::variant<int, std::string>& value() const { return dim_; }

 private:
  std::variant<int, std::string> dim_;
};

struct DeviceMeshOptions {
  std::vector<std::string> mesh_dim_names{};  // none, or one per dimension, all distinct
  std::vector<std::pair<MeshDim, std::string>> backend_override{};  // backend of some dimensions' groups
  std::optional<Milliseconds> timeout{};  // of the groups; unset: the default group's
  std::source_location where = std::source_location::current();
};

struct FromGroupOptions {
  at::Tensor mesh{};  // ranks of the world, as in DeviceMesh(); undefined: the members of the only group
  std::vector<std::string> mesh_dim_names{};  // as in DeviceMeshOptions; required for several groups
};

class DeviceMesh {
 public:
  // `mesh` holds ranks of the world, each at most once, in a CPU tensor of integers or nested vectors.
  // `device_type` is "cpu", "cuda", ... without an index. Creates the default group when there is none. For
  // devices other than the CPU it sets this process's current device: one chosen already (a current device
  // that is not 0) is kept, otherwise LOCAL_RANK's (modulo their number), otherwise its rank modulo the number of devices, with a
  // warning; kUsage when that number does not divide the world size.
  DeviceMesh(std::string device_type, const at::Tensor& mesh, DeviceMeshOptions options = {});
  DeviceMesh(std::string device_type, const std::vector<int>& mesh, DeviceMeshOptions options = {});
  DeviceMesh(std::string device_type, const std::vector<std::vector<int>>& mesh,
             DeviceMeshOptions options = {});

  // Groups that exist. They are of the default world, whose ranks a mesh holds: kUsage for a group of
  // create_group, or a part of one, and for one that was destroyed.
  // A one-dimensional mesh over a group's members. A given mesh must hold exactly those, in that order.
  static DeviceMesh from_group(const Group& group, std::string device_type, FromGroupOptions options = {});
  // One group per dimension of the mesh, each holding the ranks along its dimension.
  static DeviceMesh from_group(const std::vector<Group>& groups, std::string device_type,
                               FromGroupOptions options);

  // The slice along the named dimensions through this rank, in the order named; names given to flatten are
  // accepted. All names in order give the mesh itself. Raises kUsage when the mesh has no names, for an
  // unknown name, and for names that overlap. Local. On ranks outside the mesh: the slice through coordinate
  // 0.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  DeviceMesh operator[](std::initializer_list<std::string> names) const {
    return (*this)[std::vector<std::string>(names)];
  }
  // All dimensions merged into one, the last one fastest, named "dp_cp" by default. Collective over the ranks
  // of the mesh this one was sliced from, whose operator[] then accepts the name; the timeout is that mesh's.
  // Repeating the call returns the same mesh.
  DeviceMesh flatten(const std::optional<std::string>& mesh_dim_name = {},
                     std::source_location where = std::source_location::current()) const;

  const std::string& device_type() const;
  // Ranks of the world, as a CPU tensor of int64.
  at::Tensor mesh() const;
  int ndim() const;
  std::vector<std::int64_t> shape() const;
  // Empty when there are none.
  std::vector<std::string> mesh_dim_names() const;
  // Number of ranks along a dimension, or of the whole mesh.
  std::int64_t size(const std::optional<MeshDim>& mesh_dim = {}) const;
  // The dimension may be omitted when there is only one. On ranks outside the mesh: a non-member's handle.
  Group get_group(const std::optional<MeshDim>& mesh_dim = {}) const;
  std::vector<Group> get_all_groups() const;
  // Rank in the world.
  int get_rank() const;
  // Coordinate along a dimension, which may be omitted when there is only one. kUsage on ranks outside the
  // mesh.
  int get_local_rank(const std::optional<MeshDim>& mesh_dim = {}) const;
  // None on ranks outside the mesh.
  std::optional<std::vector<int>> get_coordinate() const;

  // Same ranks at the same coordinates, same device type, same names.
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);

 private:
  explicit DeviceMesh(std::shared_ptr<const internal::MeshView> view);
  std::shared_ptr<const internal::MeshView> view_;
};

// A mesh of the ranks 0 to n - 1 of the world, row-major; n is the product of `mesh_shape`.
DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<std::int64_t>& mesh_shape,
                            DeviceMeshOptions options = {});

// Sets this thread's current mesh for its lifetime; scopes nest.
class MeshScope {
 public:
  explicit MeshScope(DeviceMesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
  MeshScope& operator=(const MeshScope&) = delete;
};
// Raises kUsage outside every scope.
DeviceMesh current_mesh();

}  // namespace lockstep
