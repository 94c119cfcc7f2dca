// Which device a tensor goes to, as a function of the maps alone.
#include "lockstep/rpc/internal/device_plan.h"

#include <gtest/gtest.h>

#include <functional>

#include "lockstep/base/error.h"
#include "lockstep/rpc/internal/device_directory.h"

namespace lockstep::rpc::internal {
namespace {

std::string refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  ADD_FAILURE() << "nothing was raised";
  return "";
}

void expect_says(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

const std::string kAlice = "alice", kBob = "bob";

TEST(DeviceMap, RequestsTakeTheCallersMapAndAnswersItsReverse) {
  const DeviceMap map{{0, 1}, {2, 0}};
  EXPECT_EQ(target_device({kAlice, kBob, Leg::kRequest}, map, 0), 1);
  EXPECT_EQ(target_device({kAlice, kBob, Leg::kRequest}, map, 2), 0);
  EXPECT_EQ(target_device({kBob, kAlice, Leg::kAnswer}, map, 1), 0);
  EXPECT_EQ(target_device({kBob, kAlice, Leg::kAnswer}, map, 0), 2);
  EXPECT_EQ(reversed(map), (DeviceMap{{1, 0}, {0, 2}}));
  EXPECT_EQ(reversed(reversed(map)), map);
}

TEST(DeviceMap, ADeviceWithoutAMapIsRefusedNamingDeviceWorkersAndOption) {
  expect_says(refused([] {
                target_device({kAlice, kBob, Leg::kRequest}, {{0, 0}}, 3);
              }),
              {"cuda:3 of worker alice", "to worker bob", "device_maps of alice for bob",
               "does not map this device", "set_device_map(\"bob\""});
  // The map that would be needed is the caller's, who is the receiver of an answer.
  expect_says(refused([] {
                target_device({kBob, kAlice, Leg::kAnswer}, {{0, 0}}, 3);
              }),
              {"cuda:3 of worker bob", "to worker alice", "device_maps of alice for bob",
               "maps no device to this one"});
}

TEST(DeviceMap, IsOneToOneAndNotNegative) {
  check_device_map("bob", {});
  check_device_map("bob", {{0, 1}, {1, 0}});
  expect_says(refused([] {
                check_device_map("bob", {{0, 1}, {2, 1}});
              }),
              {"bob", "two devices on its device 1"});
  refused([] { check_device_map("bob", {{-1, 0}}); });
  refused([] { check_device_map("bob", {{0, -1}}); });
}

TEST(DeviceMap, PlansOfAGroupMustFitEachOther) {
  const DevicePlan bob{.worker = "bob", .maps = {{"alice", {{0, 0}}}}, .devices = {0, 1}};
  const auto check = [&](const DevicePlan& alice) {
    const DevicePlan plans[] = {bob, alice};
    check_device_plans(plans);
  };
  check({.worker = "alice", .maps = {{"bob", {{5, 1}}}, {"alice", {{0, 3}}}}});
  expect_says(refused([&] {
                check({.worker = "alice", .maps = {{"carol", {{0, 0}}}}});
              }),
              {"alice", "carol"});
  expect_says(refused([&] { check({.worker = "alice", .maps = {{"bob", {{0, 2}}}}}); }), {"cuda:2 of bob"});
  expect_says(refused([&] { check({.worker = "alice", .devices = {1}}); }),
              {"worker bob for worker alice", "cuda:0 of alice"});
  expect_says(refused([&] {
                check({.worker = "alice", .maps = {{"bob", {{0, 0}}}}, .devices = {1, 2}});
              }),
              {"cuda:0 of alice"});
}

TEST(DeviceDirectory, KnowsTheMapsOfBothDirections) {
  DeviceDirectory devices({.id = 0, .name = "alice"}, {{"bob", {{0, 1}}}});
  const WorkerInfo bob{.id = 1, .name = "bob"};
  EXPECT_EQ(devices.target(bob, Leg::kRequest, 0), 1);
  refused([&] { devices.target(bob, Leg::kAnswer, 0); });
  devices.set(1, {{3, 0}});
  EXPECT_EQ(devices.target(bob, Leg::kAnswer, 0), 3);
  EXPECT_EQ(devices.target(bob, Leg::kRequest, 0), 1) << "its own calls are as before";
  devices.set(1, {});  // another worker has the number
  refused([&] { devices.target(bob, Leg::kAnswer, 0); });
}

TEST(DeviceDirectory, CallsToOneselfMoveNothingUnlessAMapSaysSo) {
  const WorkerInfo alice{.id = 0, .name = "alice"};
  const DeviceDirectory plain(alice, {{"bob", {{0, 1}}}});
  EXPECT_EQ(plain.target(alice, Leg::kRequest, 7), 7);
  EXPECT_EQ(plain.target(alice, Leg::kAnswer, 7), 7);
  const DeviceDirectory mapped(alice, {{"alice", {{0, 1}}}});
  EXPECT_EQ(mapped.target(alice, Leg::kRequest, 0), 1);
  EXPECT_EQ(mapped.target(alice, Leg::kAnswer, 1), 0);
  refused([&] { mapped.target(alice, Leg::kRequest, 1); });
}

}  // namespace
}  // namespace lockstep::rpc::internal
