// Saving and loading a module with DTensor parameters, whole and in pieces.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/parallel/ddp_testing.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep {
namespace {

using namespace testing;

TEST(StateDicts, WholeTensorsFitAnyPlan) {
  world(4, [](int) {
    Fixture setup;
    const Net one;
    const auto state = full_state_dict(*setup.net);
    EXPECT_EQ(state.size(), one->named_parameters().size());
    for (const auto& item : state) {
      EXPECT_FALSE(is_dtensor(item.value())) << item.key();
      expect_close(item.value(), one->named_parameters()[item.key()], item.key());
    }
    Fixture other({{"blocks.*.up", RowwiseParallel{.input_layouts = Replicate()}}});
    {
      const c10::NoGradGuard no_grad;
      for (auto& p : other.net->parameters()) p.zero_();
    }
    load_full_state_dict(*other.net, state);
    expect_same_parameters(*other.net, *one, "another plan");
    EXPECT_EQ(placements(other.net->named_parameters()["blocks.0.up.weight"]), Placements{Shard(1)});
    EXPECT_TRUE(other.net->named_parameters()["blocks.0.up.weight"].requires_grad());
  });
}

TEST(StateDicts, PiecesGoThroughAnArchiveOfEachRank) {
  world(4, [](int) {
    Fixture setup;
    const Net one;
    std::stringstream bytes;
    {
      torch::serialize::OutputArchive archive;
      for (const auto& item : local_state_dict(*setup.net)) archive.write(item.key(), item.value());
      archive.save_to(bytes);
    }
    const auto weight = setup.net->named_parameters()["blocks.0.up.weight"];
    const auto version = weight._version();
    {
      const c10::NoGradGuard no_grad;
      for (auto& p : setup.net->parameters()) p.zero_();
    }
    torch::serialize::InputArchive archive;
    archive.load_from(bytes);
    StateDict state;
    for (const auto& item : setup.net->named_parameters()) {
      at::Tensor piece;
      archive.read(item.key(), piece);
      state.insert(item.key(), piece);
    }
    EXPECT_EQ(state["blocks.0.up.weight"].size(0), 5);
    load_local_state_dict(*setup.net, state);
    expect_same_parameters(*setup.net, *one, "from pieces");
    EXPECT_GT(weight._version(), version + 1);
  });
}

TEST(StateDicts, WhatDoesNotFitIsRefusedBeforeAnythingChanges) {
  world(4, [](int) {
    Fixture setup;
    const Net one;
    auto state = full_state_dict(*setup.net);
    for (auto& item : state) item.value() = item.value() * 2;
    const auto refused = [&](const StateDict& given, const std::string& why, auto load) {
      try {
        load(given);
        ADD_FAILURE() << "accepted: " << why;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kUsage);
        EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      }
    };
    const auto full = [&](const StateDict& given) { load_full_state_dict(*setup.net, given); };
    StateDict more(state), fewer;
    more.insert("extra", at::zeros({1}));
    for (const auto& item : state) {
      if (item.key() != "head.bias") fewer.insert(item.key(), item.value());
    }
    refused(more, "the module has no \"extra\"", full);
    refused(fewer, "the dict has no \"head.bias\"", full);
    refused(state, "\"blocks.0.up.weight\" has sizes [10, 8] in the dict, [5, 8] in the module",
            [&](const StateDict& given) { load_local_state_dict(*setup.net, given); });
    expect_same_parameters(*setup.net, *one, "unchanged");
  });
}

// Nothing is written instead of an empty file.
TEST(StateDicts, TorchSaveOfADTensorRaises) {
  world(2, [](int) {
    const auto x = distribute_tensor(waves({4, 2}), init_device_mesh("cpu", {2}), {Shard(0)});
    std::stringstream bytes;
    EXPECT_THROW(torch::save(x, bytes), c10::Error);
  });
}

}  // namespace
}  // namespace lockstep
