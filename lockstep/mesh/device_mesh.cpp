#include "lockstep/mesh/device_mesh.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"
#include "lockstep/mesh/internal/mesh_device.h"
#include "lockstep/mesh/internal/mesh_layout.h"

namespace lockstep {

namespace internal {

struct MeshAxis {
  std::string name;       // empty when the mesh has none
  std::vector<int> base;  // the root's dimensions it merges, the last one fastest
  Group group;
};

// The mesh that slices and flattened dimensions refer to. Slices hold it, so it lives as long as any of them.
// All but `flattened` is constant, and is read without the mutex.
struct MeshRoot {
  const std::string device_type;
  const MeshLayout layout;
  const std::optional<Milliseconds> timeout;  // of groups made later
  std::mutex mutex;
  std::map<std::string, MeshAxis> flattened;  // guarded by mutex
};

// What a DeviceMesh points to: some axes of the root, or merged ones, in any order. Constant once a
// DeviceMesh has it.
struct MeshView {
  std::shared_ptr<MeshRoot> root;  // shared with slices, which look up names in it
  std::vector<MeshAxis> axes;

  std::vector<int> ranks() const {
    std::vector<int> bases;
    for (const auto& axis : axes) bases.insert(bases.end(), axis.base.begin(), axis.base.end());
    return root->layout.ranks_over(bases);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& axis : axes) {
      if (!axis.name.empty()) names.push_back(axis.name);
    }
    return names;
  }
};

}  // namespace internal

using internal::MeshAxis;
using internal::MeshRoot;
using internal::MeshView;

namespace {

// Values, so a mesh lives at least as long as its scope. A MeshScope must end on the thread that made it, the
// innermost first: its destructor removes the last entry without checking whose it is.
thread_local std::vector<DeviceMesh> mesh_scopes;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  base::raise(ErrorKind::kUsage, base::cat("DeviceMesh: ", parts...));
}

std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += base::cat(text.empty() ? "" : ", ", "\"", name, "\"");
  return text.empty() ? "none" : text;
}

void check_names(const std::vector<std::string>& names, std::size_t n_dims) {
  if (names.empty()) return;
  if (names.size() != n_dims) {
    refuse("mesh_dim_names has ", names.size(), " names for ", n_dims, " dimensions; give one for each");
  }
  std::set<std::string> seen;
  for (const auto& name : names) {
    if (name.empty()) refuse("a name in mesh_dim_names is empty");
    if (!seen.insert(name).second) refuse("mesh_dim_names has \"", name, "\" twice; names must differ");
  }
}

// The whole mesh is checked on every rank before the first group is made: making a group blocks until its
// members have come, and a rank that refused the mesh would never come.
std::vector<int> checked_ranks(const at::Tensor& mesh) {
  if (!mesh.defined() || mesh.numel() == 0) refuse("the mesh holds no ranks");
  if (!mesh.device().is_cpu())
    refuse("the mesh tensor is on ", mesh.device().str(), "; it must be on the CPU");
  if (!at::isIntegralType(mesh.scalar_type(), /*includeBool=*/false))
    refuse("the mesh tensor is ", c10::toString(mesh.scalar_type()), "; ranks are integers");
  if (mesh.dim() == 0) refuse("the mesh tensor has no dimension; a mesh of one rank is {0}");
  const int n = get_world_size();
  if (mesh.numel() > n) refuse("the mesh has ", mesh.numel(), " ranks, the world ", n);
  const auto flat = mesh.to(at::kLong).contiguous();
  const auto* values = flat.const_data_ptr<std::int64_t>();
  std::set<std::int64_t> seen;
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    if (values[i] < 0 || values[i] >= n)
      refuse("the mesh has rank ", values[i], ", ranks of the world are 0 to ", n - 1);
    if (!seen.insert(values[i]).second) refuse("the mesh has rank ", values[i], " twice");
  }
  return {values, values + flat.numel()};
}

at::Tensor tensor_of(const std::vector<int>& ranks, const std::vector<std::int64_t>& shape) {
  return at::tensor(std::vector<std::int64_t>(ranks.begin(), ranks.end()), at::kLong).reshape(shape);
}

at::Tensor tensor_of(const std::vector<std::vector<int>>& rows) {
  std::vector<int> ranks;
  for (const auto& row : rows) {
    if (row.size() != rows.front().size())
      refuse("the rows of the mesh differ in length (", rows.front().size(), " and ", row.size(), ")");
    ranks.insert(ranks.end(), row.begin(), row.end());
  }
  if (ranks.empty()) refuse("the mesh holds no ranks");
  return tensor_of(ranks,
                   {static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(rows.front().size())});
}

// A mesh holds ranks of the default world; those of another mean other processes. Non-members' handles are of
// none.
void check_world(const Group& group) {
  const auto chosen = internal::still_there(group, "DeviceMesh: from_group");
  if (!chosen->world() || chosen->world()->is_default) return;
  refuse("from_group: group \"", chosen->name(),
         "\" is of a world that create_group made, a mesh of the default world; ",
         "give a group that new_group made of the default world, or use this one without a mesh");
}

// Ranks are distinct and in range (checked_ranks), so as many as the world has are all of them.
bool is_whole_world(const std::vector<int>& ranks) {
  return static_cast<int>(ranks.size()) == get_world_size() && std::ranges::is_sorted(ranks);
}

// Only members call it: each of them has the whole list from the mesh.
Group group_over(const std::vector<int>& ranks, const std::string& what, const std::string& backend,
                 const DeviceMeshOptions& options) {
  if (backend.empty() && is_whole_world(ranks)) return default_group();
  // With local synchronization, ranks outside of the group do not call. The ranks along one dimension form
  // several disjoint groups, and each rank makes only its own.
  return new_group(ranks, {.timeout = options.timeout,
                           .backend = backend,
                           .use_local_synchronization = true,
                           .desc = what,
                           .where = options.where});
}

// A mesh without groups yet.
MeshView make_view(std::string device_type, const at::Tensor& mesh, std::vector<std::string> names,
                   std::optional<Milliseconds> timeout = {}) {
  auto ranks = checked_ranks(mesh);
  check_names(names, static_cast<std::size_t>(mesh.dim()));
  MeshView view;
  view.root.reset(new MeshRoot{.device_type = std::move(device_type),
                               .layout = {mesh.sizes().vec(), std::move(ranks), get_rank()},
                               .timeout = timeout,
                               .mutex = {},
                               .flattened = {}});
  // Unnamed axes have empty names from here on, which index_of() never matches. A rank outside of the mesh
  // keeps the handles of a non-member.
  names.resize(static_cast<std::size_t>(mesh.dim()));
  for (std::size_t d = 0; d < names.size(); ++d)
    view.axes.push_back({names[d], {static_cast<int>(d)}, non_member_group()});
  return view;
}

std::size_t index_of(const MeshView& view, const MeshDim& dim, const char* what) {
  if (const auto* name = std::get_if<std::string>(&dim.value())) {
    const auto found = std::ranges::find(view.axes, *name, &MeshAxis::name);
    if (name->empty() || found == view.axes.end())
      refuse(what, ": no dimension \"", *name, "\"; this mesh has ", quoted(view.names()));
    return static_cast<std::size_t>(found - view.axes.begin());
  }
  const int number = std::get<int>(dim.value()), n = static_cast<int>(view.axes.size());
  if (number < -n || number >= n)
    refuse(what, ": no dimension ", number, "; this mesh has ", n, " dimensions");
  return static_cast<std::size_t>(number < 0 ? number + n : number);
}

std::size_t only_or(const MeshView& view, const std::optional<MeshDim>& dim, const char* what) {
  if (dim) return index_of(view, *dim, what);
  if (view.axes.size() > 1) refuse(what, ": this mesh has ", view.axes.size(), " dimensions; say which one");
  return 0;
}

void make_groups(MeshView& view, const DeviceMeshOptions& options) {
  // All of backend_override is resolved before the first group: its errors are raised while no rank waits.
  std::vector<std::string> backends(view.axes.size());
  for (const auto& [dim, backend] : options.backend_override) {
    auto& chosen = backends[index_of(view, dim, "backend_override")];
    if (!chosen.empty()) refuse("backend_override names a dimension twice");
    chosen = backend;
  }
  const auto& layout = view.root->layout;
  // By dimension, on every rank in the same order: two ranks that made their groups in different orders would
  // wait for each other.
  for (std::size_t d = 0; layout.has_rank() && d < backends.size(); ++d) {
    auto& axis = view.axes[d];
    const auto what = base::cat("mesh_", axis.name.empty() ? base::cat("dim_", d) : axis.name);
    axis.group = group_over(layout.ranks_over(axis.base), what, backends[d], options);
  }
}

// An axis of the view, or one that was flattened from dimensions of it.
MeshAxis named_axis(const MeshView& view, const std::string& name) {
  const auto own = std::ranges::find(view.axes, name, &MeshAxis::name);
  if (own != view.axes.end()) return *own;
  const auto has = [&](int base) {
    return std::ranges::any_of(view.axes,
                               [&](const MeshAxis& axis) { return std::ranges::count(axis.base, base) > 0; });
  };
  const std::lock_guard lock(view.root->mutex);
  const auto flat = view.root->flattened.find(name);
  if (flat == view.root->flattened.end() || !std::ranges::all_of(flat->second.base, has))
    refuse("no dimension \"", name, "\"; this mesh has ", quoted(view.names()));
  return flat->second;
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<const MeshView> view) : view_(std::move(view)) {}

DeviceMesh::DeviceMesh(std::string device_type, const at::Tensor& mesh, DeviceMeshOptions options) {
  internal::check_device_type(device_type);
  // After the device type was checked, which needs no world; the ranks are compared with the world's size, so
  // they come later.
  if (!is_initialized()) init_process_group({.where = options.where});
  auto view = make_view(std::move(device_type), mesh, options.mesh_dim_names, options.timeout);
  // Before the groups are made: their engines may use the current device.
  internal::move_to_own_device(view.root->device_type);
  make_groups(view, options);
  view_ = std::make_shared<const MeshView>(std::move(view));
}

DeviceMesh::DeviceMesh(std::string device_type, const std::vector<int>& mesh, DeviceMeshOptions options)
    : DeviceMesh(std::move(device_type), tensor_of(mesh, {static_cast<std::int64_t>(mesh.size())}),
                 std::move(options)) {}

DeviceMesh::DeviceMesh(std::string device_type, const std::vector<std::vector<int>>& mesh,
                       DeviceMeshOptions options)
    : DeviceMesh(std::move(device_type), tensor_of(mesh), std::move(options)) {}

DeviceMesh DeviceMesh::from_group(const Group& group, std::string device_type, FromGroupOptions options) {
  internal::check_device_type(device_type);
  const Group members = group ? group : default_group();
  check_world(members);
  if (!is_group_member(members)) refuse("from_group: this rank is not a member of the group");
  // In the group's order, so that a coordinate is the rank in the group.
  if (options.mesh.defined() && (options.mesh.dim() != 1 || checked_ranks(options.mesh) != members->ranks()))
    refuse("from_group: the mesh is not the group's ", members->size(), " members in their order");
  auto view = make_view(std::move(device_type), tensor_of(members->ranks(), {members->size()}),
                        std::move(options.mesh_dim_names));
  view.axes.front().group = members;
  return DeviceMesh(std::make_shared<const MeshView>(std::move(view)));
}

DeviceMesh DeviceMesh::from_group(const std::vector<Group>& groups, std::string device_type,
                                  FromGroupOptions options) {
  internal::check_device_type(device_type);
  const at::Tensor& mesh = options.mesh;
  if (groups.empty()) refuse("from_group: no group given");
  if (!mesh.defined()) refuse("from_group: several groups need a mesh that says who is where");
  if (options.mesh_dim_names.empty()) refuse("from_group: several groups need mesh_dim_names");
  if (mesh.dim() != static_cast<std::int64_t>(groups.size()))
    refuse("from_group: ", groups.size(), " groups for a mesh of ", mesh.dim(),
           " dimensions; give one for each");
  // No group is made here, so nothing blocks and the checks need not agree between ranks.
  for (const auto& group : groups) check_world(group);
  auto view = make_view(std::move(device_type), mesh, std::move(options.mesh_dim_names));
  const auto& layout = view.root->layout;
  for (std::size_t d = 0; layout.has_rank() && d < groups.size(); ++d) {
    auto& axis = view.axes[d];
    auto ranks = layout.ranks_over(axis.base);
    // Groups are ascending whatever the order in the mesh.
    std::ranges::sort(ranks);
    axis.group = groups[d] ? groups[d] : default_group();
    if (axis.group->ranks() != ranks) {
      refuse("from_group: group ", d, " (\"", axis.group->name(),
             "\") does not hold the ranks along dimension \"", axis.name, "\" of rank ", layout.rank());
    }
  }
  return DeviceMesh(std::make_shared<const MeshView>(std::move(view)));
}

DeviceMesh DeviceMesh::operator[](const std::string& name) const {
  return (*this)[std::vector<std::string>{name}];
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  if (mesh_dim_names().empty()) refuse("only a mesh with mesh_dim_names can be sliced by name");
  if (names.empty()) refuse("no dimension named; this mesh has ", quoted(mesh_dim_names()));
  // The same view: groups, root and flattened names are shared, not looked up again.
  if (names == mesh_dim_names()) return *this;
  MeshView part{.root = view_->root, .axes = {}};
  std::set<int> taken;
  for (const auto& name : names) {
    part.axes.push_back(named_axis(*view_, name));
    for (const int base : part.axes.back().base) {
      if (!taken.insert(base).second) refuse("the dimensions ", quoted(names), " overlap");
    }
  }
  return DeviceMesh(std::make_shared<const MeshView>(std::move(part)));
}

DeviceMesh DeviceMesh::flatten(const std::optional<std::string>& mesh_dim_name,
                               std::source_location where) const {
  const auto wrong = [&](const auto&... parts) {
    refuse("flatten (called at ", where.file_name(), ":", where.line(), ")", parts...);
  };
  if (mesh_dim_names().empty()) wrong(" needs a mesh with mesh_dim_names");
  auto& root = *view_->root;
  MeshAxis flat{.name = {}, .base = {}, .group = non_member_group()};
  for (const auto& axis : view_->axes) {
    flat.name += (flat.name.empty() ? "" : "_") + axis.name;
    flat.base.insert(flat.base.end(), axis.base.begin(), axis.base.end());
  }
  flat.name = mesh_dim_name.value_or(flat.name);
  const auto one = [&](const MeshAxis& axis) {
    return DeviceMesh(std::make_shared<const MeshView>(MeshView{.root = view_->root, .axes = {axis}}));
  };
  // A one-dimensional mesh flattened under its own name is itself.
  if (std::ranges::count(mesh_dim_names(), flat.name) > 0) {
    if (ndim() == 1) return *this;
    wrong(": \"", flat.name, "\" is a dimension of the mesh; choose another name");
  }
  {
    // Not held while the group is made below: that blocks until all members have come, and slices on other
    // threads look up names meanwhile.
    const std::lock_guard lock(root.mutex);
    if (const auto found = root.flattened.find(flat.name); found != root.flattened.end()) {
      if (found->second.base == flat.base) return one(found->second);
      wrong(": \"", flat.name, "\" was made of other dimensions; choose another name");
    }
  }
  if (ndim() == 1) {
    // One axis under another name: the ranks are the same, so is the group.
    flat.group = view_->axes.front().group;
  } else if (root.layout.has_rank()) {
    flat.group =
        group_over(view_->ranks(), "mesh_" + flat.name, "", {.timeout = root.timeout, .where = where});
  }
  const std::lock_guard lock(root.mutex);
  // Only a group that was made is entered: after an error the call can be repeated.
  return one(root.flattened.emplace(flat.name, flat).first->second);
}

const std::string& DeviceMesh::device_type() const {
  return view_->root->device_type;
}

at::Tensor DeviceMesh::mesh() const {
  return tensor_of(view_->ranks(), shape());
}

int DeviceMesh::ndim() const {
  return static_cast<int>(view_->axes.size());
}

std::vector<std::int64_t> DeviceMesh::shape() const {
  std::vector<std::int64_t> shape;
  for (const auto& axis : view_->axes) shape.push_back(view_->root->layout.size_of(axis.base));
  return shape;
}

std::vector<std::string> DeviceMesh::mesh_dim_names() const {
  return view_->names();
}

std::int64_t DeviceMesh::size(const std::optional<MeshDim>& mesh_dim) const {
  if (mesh_dim) return shape()[index_of(*view_, *mesh_dim, "size")];
  return static_cast<std::int64_t>(view_->ranks().size());
}

Group DeviceMesh::get_group(const std::optional<MeshDim>& mesh_dim) const {
  return view_->axes[only_or(*view_, mesh_dim, "get_group")].group;
}

std::vector<Group> DeviceMesh::get_all_groups() const {
  std::vector<Group> groups;
  for (const auto& axis : view_->axes) groups.push_back(axis.group);
  return groups;
}

int DeviceMesh::get_rank() const {
  return view_->root->layout.rank();
}

int DeviceMesh::get_local_rank(const std::optional<MeshDim>& mesh_dim) const {
  const auto d = only_or(*view_, mesh_dim, "get_local_rank");
  if (!view_->root->layout.has_rank()) refuse("get_local_rank: rank ", get_rank(), " is not in this mesh");
  return view_->root->layout.place_in(view_->axes[d].base);
}

std::optional<std::vector<int>> DeviceMesh::get_coordinate() const {
  if (!view_->root->layout.has_rank()) return std::nullopt;
  std::vector<int> coordinate;
  for (const auto& axis : view_->axes) coordinate.push_back(view_->root->layout.place_in(axis.base));
  return coordinate;
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  return a.shape() == b.shape() && a.view_->ranks() == b.view_->ranks() &&
         a.device_type() == b.device_type() && a.mesh_dim_names() == b.mesh_dim_names();
}

DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<std::int64_t>& mesh_shape,
                            DeviceMeshOptions options) {
  std::int64_t n = 1;
  for (const auto size : mesh_shape) {
    if (size < 1 || __builtin_mul_overflow(n, size, &n)) refuse("a dimension of ", size, " ranks");
  }
  if (mesh_shape.empty()) refuse("mesh_shape is empty; a mesh has at least one dimension");
  internal::check_device_type(device_type);
  check_names(options.mesh_dim_names, mesh_shape.size());
  if (!is_initialized()) init_process_group({.where = options.where});
  if (n > get_world_size()) refuse("mesh_shape needs ", n, " ranks, the world has ", get_world_size());
  return DeviceMesh(device_type, at::arange(n, at::kLong).reshape(mesh_shape), std::move(options));
}

MeshScope::MeshScope(DeviceMesh mesh) {
  mesh_scopes.push_back(std::move(mesh));
}

MeshScope::~MeshScope() {
  mesh_scopes.pop_back();
}

DeviceMesh current_mesh() {
  if (mesh_scopes.empty())
    base::raise(ErrorKind::kUsage, "current_mesh: no MeshScope is open on this thread");
  return mesh_scopes.back();
}

}  // namespace lockstep
