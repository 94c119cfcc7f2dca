// Meshes: layout, groups, slices, and what callers may get wrong.
#include "lockstep/mesh/device_mesh.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/mesh/internal/mesh_layout.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

using testing::world;

// Eight devices of a type that this build has no back end for; each rank thread has its own current one.
using FakeDevices = c10::impl::FakeGuardImpl<c10::DeviceType::PrivateUse1>;
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeDevices);
constexpr auto kFake = "privateuseone";

using Ranks = std::vector<int>;

std::string refusal(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_TRUE(error.kind() == ErrorKind::kUsage || error.kind() == ErrorKind::kUnsupported) << error.what();
    return error.what();
  }
  return "nothing was raised";
}

// The sum over a group of each rank's number.
int sum_over(const Group& group) {
  auto number = at::full({1}, get_rank(), at::kInt);
  all_reduce(number, {.group = group});
  return number.item<int>();
}

TEST(MeshLayout, ListsTheRanksAlongEachDimension) {
  const internal::MeshLayout layout({2, 3, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, 9);
  EXPECT_EQ(layout.place_in({0}), 1);
  EXPECT_EQ(layout.place_in({1}), 1);
  EXPECT_EQ(layout.place_in({2}), 1);
  EXPECT_EQ(layout.ranks_over({0}), (Ranks{3, 9}));
  EXPECT_EQ(layout.ranks_over({1}), (Ranks{7, 9, 11}));
  EXPECT_EQ(layout.ranks_over({2}), (Ranks{8, 9}));
  EXPECT_EQ(layout.ranks_over({0, 2}), (Ranks{2, 3, 8, 9}));
  EXPECT_EQ(layout.ranks_over({2, 0}), (Ranks{2, 8, 3, 9}));
  EXPECT_EQ(layout.place_in({1, 2}), 3);
  EXPECT_EQ(internal::MeshLayout({2}, {5, 7}, 6).ranks_over({0}), (Ranks{5, 7}));
}

TEST(DeviceMesh, OfTwoByFourHasRowsAndColumns) {
  world(8, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 4}, {.mesh_dim_names = {"dp", "tp"}});
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.shape(), (std::vector<std::int64_t>{2, 4}));
    EXPECT_EQ(mesh.size(), 8);
    EXPECT_EQ(mesh.size("tp"), 4);
    EXPECT_EQ(mesh.size(-2), 2);
    EXPECT_EQ(mesh.get_rank(), rank);
    EXPECT_EQ(mesh.device_type(), "cpu");
    EXPECT_TRUE(at::equal(mesh.mesh(), at::arange(8, at::kLong).reshape({2, 4})));
    EXPECT_EQ(mesh.get_coordinate(), (std::vector<int>{rank / 4, rank % 4}));
    EXPECT_EQ(mesh.get_local_rank("dp"), rank / 4);
    EXPECT_EQ(mesh.get_local_rank(1), rank % 4);
    if (rank == 5) {
      EXPECT_EQ(mesh.get_group("tp")->ranks(), (Ranks{4, 5, 6, 7}));
      EXPECT_EQ(mesh.get_group("dp")->ranks(), (Ranks{1, 5}));
      EXPECT_EQ(mesh.get_coordinate(), (std::vector<int>{1, 1}));
    }
    EXPECT_EQ(mesh.get_all_groups(), (std::vector<Group>{mesh.get_group(0), mesh.get_group(1)}));
    EXPECT_EQ(sum_over(mesh.get_group("tp")), rank < 4 ? 6 : 22);
    EXPECT_EQ(sum_over(mesh.get_group("dp")), 2 * (rank % 4) + 4);
  });
}

TEST(DeviceMesh, OfOneDimensionOverTheWorldUsesTheDefaultGroup) {
  for (const int n : {1, 2, 3}) {
    world(n, [n](int) {
      const auto mesh = init_device_mesh("cpu", {n});
      EXPECT_EQ(mesh.get_group(), default_group());
      EXPECT_EQ(get_pg_count(), 1);
      EXPECT_TRUE(mesh.mesh_dim_names().empty());
    });
  }
}

TEST(DeviceMesh, MayHoldSomeRanksInAnyOrder) {
  world(4, [](int rank) {
    const DeviceMesh mesh("cpu", std::vector<std::vector<int>>{{3, 0}}, {.mesh_dim_names = {"a", "b"}});
    EXPECT_TRUE(at::equal(mesh.mesh(), at::tensor({3, 0}, at::kLong).reshape({1, 2})));
    if (rank == 0 || rank == 3) {
      EXPECT_EQ(mesh.get_local_rank("b"), rank == 3 ? 0 : 1);
      EXPECT_EQ(mesh.get_group("b")->ranks(), (Ranks{0, 3}));
      EXPECT_EQ(mesh.get_group("a")->ranks(), (Ranks{rank}));
      EXPECT_EQ(sum_over(mesh.get_group("b")), 3);
    } else {
      EXPECT_EQ(mesh.get_coordinate(), std::nullopt);
      EXPECT_FALSE(is_group_member(mesh.get_group("b")));
      EXPECT_EQ(mesh["b"].get_coordinate(), std::nullopt);
      EXPECT_NE(refusal([&] { mesh.get_local_rank("b"); }).find("is not in this mesh"), std::string::npos);
    }
  });
}

TEST(DeviceMesh, SlicesByNameAndReusesGroups) {
  world(8, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"dp", "cp", "tp"}});
    const int groups = get_pg_count();
    const auto tp = mesh["tp"];
    EXPECT_EQ(tp.ndim(), 1);
    EXPECT_EQ(tp.get_group(), mesh.get_group("tp"));
    EXPECT_EQ(tp.get_local_rank(), rank % 2);
    EXPECT_TRUE(at::equal(tp.mesh(), at::tensor({rank / 2 * 2, rank / 2 * 2 + 1}, at::kLong)));

    const auto dp_cp = mesh[{"dp", "cp"}];
    EXPECT_EQ(dp_cp.shape(), (std::vector<std::int64_t>{2, 2}));
    EXPECT_TRUE(at::equal(dp_cp.mesh(), (at::arange(4, at::kLong) * 2 + rank % 2).reshape({2, 2})));
    const auto cp_dp = mesh[{"cp", "dp"}];
    EXPECT_TRUE(at::equal(cp_dp.mesh(), dp_cp.mesh().t())) << "the order of the names";
    EXPECT_EQ(cp_dp.get_coordinate(), (std::vector<int>{rank / 2 % 2, rank / 4}));
    EXPECT_EQ(dp_cp["cp"], mesh["cp"]);
    EXPECT_EQ((mesh[{"dp", "cp", "tp"}]), mesh);
    EXPECT_FALSE(cp_dp == dp_cp);
    EXPECT_EQ(get_pg_count(), groups);
  });
}

TEST(DeviceMesh, FlattensDimensionsIntoOneThatHasAName) {
  world(8, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"dp", "cp", "tp"}});
    const auto flat = mesh[{"dp", "cp"}].flatten();
    EXPECT_EQ(flat.mesh_dim_names(), (std::vector<std::string>{"dp_cp"}));
    EXPECT_EQ(flat.size(), 4);
    EXPECT_EQ(flat.get_local_rank(), rank / 2);
    EXPECT_EQ(flat.get_group()->ranks(), rank % 2 == 0 ? (Ranks{0, 2, 4, 6}) : (Ranks{1, 3, 5, 7}));
    EXPECT_EQ(sum_over(flat.get_group()), 12 + 4 * (rank % 2));
    EXPECT_EQ(mesh["dp_cp"].get_group(), flat.get_group());
    EXPECT_EQ((mesh[{"dp", "cp"}].flatten().get_group()), flat.get_group()) << "made once";
    EXPECT_EQ((mesh[{"dp_cp", "tp"}].shape()), (std::vector<std::int64_t>{4, 2}));
    EXPECT_EQ(mesh.flatten("all").get_group(), default_group());
    EXPECT_EQ(mesh["tp"].flatten("t").get_group(), mesh.get_group("tp"));

    EXPECT_NE(refusal([&] { mesh[{"dp_cp", "dp"}]; }).find("overlap"), std::string::npos);
    EXPECT_NE(refusal([&] { mesh["tp"]["dp_cp"]; }).find("no dimension \"dp_cp\""), std::string::npos);
    EXPECT_NE((refusal([&] {
                 mesh[{"cp", "tp"}].flatten("dp_cp");
               }).find("made of other dimensions")),
              std::string::npos);
    EXPECT_NE((refusal([&] {
                 mesh[{"cp", "tp"}].flatten("tp");
               }).find("choose another name")),
              std::string::npos);
  });
}

TEST(DeviceMesh, FlattensIntoAGroupWithTheTimeoutOfTheMesh) {
  world(8, [](int) {
    const auto mesh = init_device_mesh(
        "cpu", {2, 2, 2}, {.mesh_dim_names = {"dp", "cp", "tp"}, .timeout = Milliseconds(54'321)});
    const auto flat = mesh[{"dp", "cp"}].flatten();
    EXPECT_EQ(flat.get_group()->timeout(), Milliseconds(54'321));
  });
}

TEST(DeviceMesh, WrapsGroupsThatExist) {
  world(4, [](int rank) {
    const auto pairs = new_subgroups(2);
    const auto one = DeviceMesh::from_group(pairs.mine, "cpu", {.mesh_dim_names = {"pair"}});
    EXPECT_EQ(one.get_group("pair"), pairs.mine);
    EXPECT_EQ(one.get_local_rank(), rank % 2);
    EXPECT_EQ(DeviceMesh::from_group(Group(), "cpu").size(), 4);

    const auto across = new_subgroups_by_enumeration({{0, 2}, {1, 3}});
    const auto grid = at::arange(4).reshape({2, 2});
    const auto mesh = DeviceMesh::from_group({across.mine, pairs.mine}, "cpu",
                                             {.mesh = grid, .mesh_dim_names = {"a", "b"}});
    EXPECT_EQ(mesh.get_group("a"), across.mine);
    EXPECT_EQ(mesh.get_group("b"), pairs.mine);
    EXPECT_EQ(mesh.get_coordinate(), (std::vector<int>{rank / 2, rank % 2}));

    const auto from = [&](std::vector<Group> groups, at::Tensor array, std::vector<std::string> names) {
      return refusal(
          [&] { DeviceMesh::from_group(groups, "cpu", {.mesh = array, .mesh_dim_names = names}); });
    };
    EXPECT_NE(from({pairs.mine, across.mine}, grid, {"a", "b"}).find("does not hold the ranks along"),
              std::string::npos);
    EXPECT_NE(from({pairs.mine}, grid, {"a", "b"}).find("1 groups for a mesh of 2 dimensions"),
              std::string::npos);
    EXPECT_NE(from({across.mine, pairs.mine}, grid, {}).find("need mesh_dim_names"), std::string::npos);
    EXPECT_NE(from({across.mine, pairs.mine}, {}, {"a", "b"}).find("need a mesh"), std::string::npos);
    EXPECT_NE(from({}, grid, {"a", "b"}).find("no group given"), std::string::npos);
    EXPECT_NE(refusal([&] {
                DeviceMesh::from_group(pairs.mine, "cpu", {.mesh = at::arange(4)});
              }).find("2 members"),
              std::string::npos);
  });
}

TEST(DeviceMesh, RefusesGroupsOfOtherWorldsWhoseRanksMeanOtherProcesses) {
  const auto store = std::make_shared<HashStore>();
  world(2, [&](int rank) {
    const auto backwards = create_group({.store = store, .rank = 1 - rank, .size = 2, .name = "backwards"});
    const auto part = new_group({.parent = backwards});
    const auto gone = new_group();
    destroy_process_group(gone);
    const auto line = at::arange(2).reshape({1, 2});
    for (const auto& group : {backwards, part, gone}) {
      const std::string wrong = group == gone ? "was destroyed" : "is of a world that create_group made";
      const auto named = "\"" + group->name() + "\" " + wrong;
      const auto one = refusal([&] { DeviceMesh::from_group(group, "cpu"); });
      EXPECT_NE(one.find(named), std::string::npos) << one;
      const auto two = refusal([&] {
        DeviceMesh::from_group({new_group({rank}, {.use_local_synchronization = true}), group}, "cpu",
                               {.mesh = line, .mesh_dim_names = {"a", "b"}});
      });
      EXPECT_NE(two.find(named), std::string::npos) << two;
    }
    // Also without a default world, whose lack is not what is wrong.
    destroy_process_group();
    const auto alone = refusal([&] { DeviceMesh::from_group(backwards, "cpu"); });
    EXPECT_NE(alone.find("create_group made"), std::string::npos) << alone;
  });
}

TEST(DeviceMesh, RefusesWhatMakesNoMesh) {
  world(2, [](int) {
    const auto make = [](const char* type, const at::Tensor& mesh, std::vector<std::string> names = {}) {
      return refusal([&] { DeviceMesh(type, mesh, {.mesh_dim_names = names}); });
    };
    const auto two = at::arange(2);
    EXPECT_EQ(make("cpu:0", two), "DeviceMesh: \"cpu:0\" names one device; give the type only, \"cpu\"");
    EXPECT_NE(make("toaster", two).find("not a device type"), std::string::npos);
    EXPECT_EQ(make("cuda", two), "DeviceMesh: this process has no cuda device");
    EXPECT_EQ(make("cpu", at::arange(3)), "DeviceMesh: the mesh has 3 ranks, the world 2");
    EXPECT_EQ(make("cpu", two + 1), "DeviceMesh: the mesh has rank 2, ranks of the world are 0 to 1");
    EXPECT_EQ(make("cpu", two * 0), "DeviceMesh: the mesh has rank 0 twice");
    EXPECT_NE(make("cpu", two.to(at::kFloat)).find("ranks are integers"), std::string::npos);
    EXPECT_NE(make("cpu", two.to(at::kMeta)).find("must be on the CPU"), std::string::npos);
    EXPECT_NE(make("cpu", at::Tensor()).find("holds no ranks"), std::string::npos);
    EXPECT_NE(make("cpu", two, {"a", "b"}).find("2 names for 1 dimensions"), std::string::npos);
    EXPECT_NE(make("cpu", two.reshape({2, 1}), {"a", "a"}).find("\"a\" twice"), std::string::npos);
    EXPECT_EQ(refusal([] {
                init_device_mesh("cpu", {2, 2});
              }),
              "DeviceMesh: mesh_shape needs 4 ranks, the world has 2");
    EXPECT_NE(refusal([] { init_device_mesh("cpu", {}); }).find("mesh_shape is empty"), std::string::npos);
    EXPECT_NE(refusal([] { init_device_mesh("cpu", {0}); }).find("a dimension of 0 ranks"),
              std::string::npos);
    EXPECT_EQ(get_pg_count(), 1) << "nothing was made";
  });
}

TEST(DeviceMesh, RefusesQuestionsItCannotAnswer) {
  world(4, [](int) {
    const auto plain = init_device_mesh("cpu", {2, 2});
    EXPECT_EQ(refusal([&] { plain.get_group(); }),
              "DeviceMesh: get_group: this mesh has 2 dimensions; say which one");
    EXPECT_NE(refusal([&] { plain.get_local_rank(); }).find("say which one"), std::string::npos);
    EXPECT_EQ(refusal([&] { plain.get_group(2); }),
              "DeviceMesh: get_group: no dimension 2; this mesh has 2 dimensions");
    EXPECT_EQ(refusal([&] { plain["tp"]; }),
              "DeviceMesh: only a mesh with mesh_dim_names can be sliced by name");
    const auto words = refusal([&] { plain.flatten(); });
    EXPECT_NE(words.find("needs a mesh with mesh_dim_names"), std::string::npos) << words;
    EXPECT_NE(words.find("device_mesh_test.cpp:"), std::string::npos) << words;
    const auto named = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
    EXPECT_EQ(refusal([&] { named["pp"]; }), "DeviceMesh: no dimension \"pp\"; this mesh has \"dp\", \"tp\"");
    EXPECT_EQ(refusal([&] { named.size("pp"); }),
              "DeviceMesh: size: no dimension \"pp\"; this mesh has \"dp\", \"tp\"");
  });
}

TEST(DeviceMesh, TakesTheBackEndOfADimensionFromItsOverride) {
  world(4, [](int) {
    const auto mesh = init_device_mesh(
        "cpu", {2, 2},
        {.mesh_dim_names = {"dp", "tp"}, .backend_override = {{"tp", "cpu:host"}, {0, "host"}}});
    EXPECT_EQ(mesh.get_group("tp")->backend(), "host");
    const auto with = [](std::vector<std::pair<MeshDim, std::string>> override_) {
      return refusal([&] { init_device_mesh("cpu", {2, 2}, {.backend_override = override_}); });
    };
    EXPECT_NE(with({{"tp", "host"}}).find("backend_override: no dimension \"tp\""), std::string::npos);
    EXPECT_NE(with({{0, "host"}, {-2, "host"}}).find("names a dimension twice"), std::string::npos);
    EXPECT_NE(with({{0, "pigeons"}}).find("pigeons"), std::string::npos);
  });
}

TEST(DeviceMesh, MakesTheDefaultGroupWhenThereIsNone) {
  const auto mesh = init_device_mesh("cpu", {1}, {.mesh_dim_names = {"dp"}});
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(mesh["dp"].get_group(), default_group());
  destroy_process_group();
}

std::atomic<int> guesses{0};

TEST(DeviceMesh, MovesEachRankToADeviceOfItsOwn) {
  const FakeDevices devices;
  set_log_sink([](LogLevel level, std::string_view text) {
    if (level == LogLevel::kWarn && text.find("rank modulo") != std::string_view::npos) ++guesses;
  });
  world(2, [&](int rank) {
    init_device_mesh(kFake, {2});
    EXPECT_EQ(devices.getDevice().index(), rank) << "the rank modulo the number of devices";
    devices.setDevice({c10::DeviceType::PrivateUse1, 5});
    init_device_mesh(kFake, {2});
    EXPECT_EQ(devices.getDevice().index(), 5) << "the user's choice stays";
    devices.setDevice({c10::DeviceType::PrivateUse1, 0});
  });
  set_log_sink(nullptr);
  EXPECT_EQ(guesses, 2) << "a warning per rank, none for the user's choice";
  setenv("LOCAL_RANK", "3", 1);
  world(1, [&](int) {
    init_device_mesh(kFake, {1});
    EXPECT_EQ(devices.getDevice().index(), 3);
    devices.setDevice({c10::DeviceType::PrivateUse1, 0});
  });
  unsetenv("LOCAL_RANK");
  world(9, [&](int) {
    EXPECT_NE(refusal([] { init_device_mesh(kFake, {9}); }).find("9 ranks do not divide by 8"),
              std::string::npos);
  });
}

TEST(MeshScope, SetsTheCurrentMeshOfItsThread) {
  world(2, [](int) {
    EXPECT_NE(refusal([] { current_mesh(); }).find("no MeshScope is open"), std::string::npos);
    const auto outer = init_device_mesh("cpu", {2, 1}, {.mesh_dim_names = {"dp", "tp"}});
    {
      const MeshScope scope(outer);
      EXPECT_EQ(current_mesh(), outer);
      {
        const MeshScope inner(outer["dp"]);
        EXPECT_EQ(current_mesh(), outer["dp"]);
      }
      EXPECT_EQ(current_mesh(), outer);
    }
    EXPECT_NE(refusal([] { current_mesh(); }).find("no MeshScope is open"), std::string::npos);
  });
}

}  // namespace
}  // namespace lockstep
