// Object collectives on ranks that are threads: values of every size and type, sub-groups, and what callers
// get wrong.
#include "lockstep/collective/objects.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using testing::kSizes;
using testing::world;

struct Report {
  int rank = -1;
  std::string words;
  at::Tensor tensor;
};
auto lockstep_fields(SelfOf<Report> auto& self) {
  return fields({.name = "Report", .members = "rank words tensor"}, self.rank, self.words, self.tensor);
}

// Of another size on every rank.
Report report(int rank) {
  return {.rank = rank,
          .words = std::string(static_cast<std::size_t>(rank * 1000), 'x'),
          .tensor = at::full({rank}, rank)};
}
void expect_report(const Report& report_, int rank) {
  EXPECT_EQ(report_.rank, rank);
  EXPECT_EQ(report_.words.size(), static_cast<std::size_t>(rank * 1000));
  EXPECT_TRUE(at::equal(report_.tensor, at::full({rank}, rank)));
}

std::string refusal(const std::function<void()>& fn, ErrorKind kind = ErrorKind::kUsage) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "nothing was raised";
}
bool says(const std::string& words, const std::string& part) {
  return words.find(part) != std::string::npos;
}

TEST(AllGatherObject, BringsEveryRanksValueToAll) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      std::vector<Report> reports(static_cast<std::size_t>(n));
      all_gather_object(reports, report(rank));
      for (int r = 0; r < n; ++r) expect_report(reports[static_cast<std::size_t>(r)], r);

      std::vector<Object> mixed(static_cast<std::size_t>(n));
      all_gather_object(mixed, rank % 2 == 0 ? Object(rank) : Object("odd"));
      EXPECT_EQ(mixed.front().as<int>(), 0);
      if (n > 1) {
        EXPECT_EQ(mixed[1].as<std::string>(), "odd");
      }
      std::vector<bool> flags(static_cast<std::size_t>(n));
      all_gather_object(flags, rank == 0);
      EXPECT_TRUE(flags.front());
    });
  }
}

TEST(GatherObject, BringsEveryRanksValueToOne) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      const int dst = n - 1;
      const auto reports = gather_object(report(rank), {.dst = dst});
      EXPECT_EQ(reports.size(), static_cast<std::size_t>(rank == dst ? n : 0));
      for (int r = 0; r < n && rank == dst; ++r) expect_report(reports[static_cast<std::size_t>(r)], r);
      const auto numbers = gather_object(rank);
      EXPECT_EQ(numbers.size(), static_cast<std::size_t>(rank == 0 ? n : 0));
      if (rank == 0) {
        EXPECT_EQ(numbers.back(), n - 1);
      }
    });
  }
}

TEST(Objects, TakeLiteralsAndSendThemAsStrings) {
  world(2, [](int rank) {
    const std::vector<std::string> both = {"zero", "one!"};
    const auto at_root = rank == 0 ? both : std::vector<std::string>();
    const char* const pointer = rank == 0 ? "zero" : "one!";
    EXPECT_EQ(rank == 0 ? gather_object("zero") : gather_object("one!"), at_root);
    EXPECT_EQ(gather_object(pointer), at_root);
    EXPECT_EQ(gather_object(std::string_view(pointer)), at_root);
    std::vector<std::string> all(2);
    all_gather_object(all, pointer);
    EXPECT_EQ(all, both);
    EXPECT_EQ(rank == 0 ? scatter_object_list({"a", "b"}) : scatter_object_list({}), rank == 0 ? "a" : "b");
    EXPECT_EQ(scatter_object_list(rank == 0 ? std::vector{"c", "d"} : std::vector<const char*>{}),
              rank == 0 ? "c" : "d");
    if (rank == 0) return send_object_list({"hello", "there"}, {.dst = 1});
    std::vector<std::string> came(2);
    recv_object_list(came, {.src = 0});
    EXPECT_EQ(came, (std::vector<std::string>{"hello", "there"}));
  });
}

TEST(Objects, HaveAPositiveTimeoutOrNone) {
  world(2, [](int rank) {
    std::vector<int> list = {rank};
    for (const auto timeout : {Milliseconds(0), Milliseconds(-1)}) {
      const auto refused = refusal([&] { broadcast_object_list(list, {.timeout = timeout}); });
      EXPECT_TRUE(says(refused, "a timeout of ") && says(refused, "objects_test.cpp:")) << refused;
    }
    broadcast_object_list(list, {.src = 1, .timeout = kNoTimeout});
    EXPECT_EQ(list.front(), 1);
    set_timeout(kNoTimeout);
    EXPECT_EQ(gather_object(rank).size(), rank == 0 ? 2u : 0u);
  });
}

TEST(BroadcastObjectList, ReplacesEveryRanksList) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      using Value = std::variant<int, std::string, Report>;
      std::vector<Value> list = {0, 0, 0};
      if (rank == n - 1) list = {7, "seven", report(7)};
      broadcast_object_list(list, {.src = n - 1});
      EXPECT_EQ(std::get<int>(list[0]), 7);
      EXPECT_EQ(std::get<std::string>(list[1]), "seven");
      expect_report(std::get<Report>(list[2]), 7);
      std::vector<std::string> empty;
      broadcast_object_list(empty);
      EXPECT_TRUE(empty.empty());
    });
  }
}

TEST(ScatterObjectList, GivesEachRankItsEntry) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      std::vector<Report> all;
      for (int r = 0; r < n && rank == 0; ++r) all.push_back(report(r));
      expect_report(scatter_object_list(all), rank);
    });
  }
}

TEST(ObjectLists, GoFromOneRankToAnother) {
  for (const bool batch : {false, true}) {
    world(3, [batch](int rank) {
      if (rank == 0) {
        const std::vector<Object> list = {Object(report(2)), Object("two")};
        send_object_list(list, {.dst = 1, .use_batch = batch});
        send_object_list(list, {.group_dst = 2, .use_batch = batch});
      } else {
        std::vector<Object> list(2);
        const auto from = rank == 1 ? recv_object_list(list, {.src = 0, .use_batch = batch})
                                    : recv_object_list(list, {.use_batch = batch});
        EXPECT_EQ(from, 0);
        expect_report(list[0].as<Report>(), 2);
        EXPECT_EQ(list[1].as<std::string>(), "two");
      }
    });
  }
}

TEST(ObjectCollectives, WorkInSubGroupsAndLeaveOthersUntouched) {
  world(4, [](int rank) {
    const auto group = new_group({1, 3});
    std::vector<int> gathered = {-1, -1}, list = {rank};
    all_gather_object(gathered, rank, {.group = group});
    const std::vector<int> entries = rank == 3 ? std::vector<int>{10, 30} : std::vector<int>{};
    const int scattered = scatter_object_list(entries, {.src = 3, .group = group});
    broadcast_object_list(list, {.group_src = 1, .group = group});
    std::vector<int> sent = {rank};
    if (rank == 1) {
      send_object_list(sent, {.dst = 3, .group = group});
    } else {
      EXPECT_EQ(recv_object_list(sent, {.group = group}), rank == 3 ? std::optional(1) : std::nullopt);
    }
    if (rank % 2 == 1) {
      EXPECT_EQ(gathered, (std::vector<int>{1, 3}));
      EXPECT_EQ(scattered, rank * 10);
      EXPECT_EQ(list.front(), 3);
    } else {
      EXPECT_EQ(gathered, (std::vector<int>{-1, -1}));
      EXPECT_EQ(scattered, 0);
      EXPECT_EQ(list.front(), rank);
    }
    EXPECT_EQ(sent.front(), rank == 3 ? 1 : rank);
    if (rank == 1) {
      EXPECT_TRUE(says(refusal([&] { broadcast_object_list(list, {.src = 0, .group = group}); }),
                       "the members of this group have the ranks 1, 3"));
    }
  });
}

TEST(ObjectCollectives, RefuseBadArgumentsBeforeAnythingIsSent) {
  world(2, [](int rank) {
    std::vector<int> three(3), two(2), none;
    const std::vector<int> entries = {1, 2};
    auto words = refusal([&] { all_gather_object(three, 1); });
    EXPECT_TRUE(says(words, "object_list has 3 entries; it needs 2")) << words;
    EXPECT_TRUE(says(words, "all_gather_object of group \"0\" (rank ")) << words;
    EXPECT_TRUE(says(words, "objects_test.cpp:")) << words;
    EXPECT_TRUE(says(refusal([&] { scatter_object_list(two, {.src = 1 - rank}); }), "must be empty here"));
    EXPECT_TRUE(says(refusal([&] { gather_object(1, {.dst = 2}); }), "dst is 2"));
    EXPECT_TRUE(says(refusal([&] { broadcast_object_list(two, {.src = 2}); }), "src is 2"));
    EXPECT_TRUE(says(refusal([&] { broadcast_object_list(two, {.src = 0, .group_src = 0}); }), "both given"));
    EXPECT_TRUE(says(refusal([&] { broadcast_object_list(two, {.group_src = 2}); }), "are 0 to 1"));
    EXPECT_TRUE(says(refusal([&] { scatter_object_list(none, {.src = rank}); }), "is required"));
    EXPECT_TRUE(says(refusal([&] { scatter_object_list(three, {.src = rank}); }), "has 3 entries"));
    EXPECT_TRUE(says(refusal([&] { send_object_list(two, {.dst = rank}); }), "this rank itself"));
    EXPECT_TRUE(says(refusal([&] { send_object_list(two, {}); }), "neither dst nor group_dst"));
    EXPECT_TRUE(says(refusal([&] { send_object_list(none, {.dst = 1 - rank}); }), "is empty"));
    EXPECT_TRUE(says(refusal([&] { recv_object_list(two, {.src = rank}); }), "this rank itself"));
    EXPECT_TRUE(says(refusal([&] { broadcast_object_list(two, {.device = c10::Device(at::kCUDA, 0)}); },
                             ErrorKind::kUnsupported),
                     "device is cuda:0"));
    all_gather_object(two, rank);
    EXPECT_EQ(two, (std::vector<int>{0, 1})) << "the group goes on";
  });
}

// Cannot be encoded on rank `bad`.
at::Tensor tensor_or_bad(int rank, int bad) {
  const auto tensor = at::full({2}, rank);
  return rank == bad ? tensor.to(at::kMeta) : tensor;
}

TEST(ObjectCollectives, TellEveryRankAtOnceWhoCouldNotEncodeAndGoOn) {
  for (const int n : {1, 2, 3, 4}) {
    world(n, [n](int rank) {
      const int bad = n - 1;
      const auto told = [&](const std::function<void()>& fn) {
        const auto words = refusal(fn, ErrorKind::kUnsupported);
        EXPECT_TRUE(says(words, "rank " + std::to_string(bad)) && says(words, "could not encode its object"))
            << words;
        EXPECT_EQ(says(words, "(this one)"), rank == bad) << words;
        EXPECT_TRUE(says(words, "meta device") && says(words, "objects_test.cpp:")) << words;
      };
      std::vector<at::Tensor> all(static_cast<std::size_t>(n));
      const auto mine = tensor_or_bad(rank, bad);
      told([&] { all_gather_object(all, mine); });
      EXPECT_FALSE(all.front().defined()) << "all or nothing";
      const auto gather = [&] { gather_object(mine); };
      if (rank == 0 || rank == bad) {
        told(gather);
      } else {
        gather();
      }
      std::vector<at::Tensor> list = {at::full({1}, 1), mine};
      told([&] { broadcast_object_list(list, {.src = bad}); });
      const std::vector<at::Tensor> parts(static_cast<std::size_t>(rank == bad ? n : 0), mine);
      told([&] { scatter_object_list(parts, {.src = bad}); });
      if (n > 1 && rank == bad) told([&] { send_object_list(list, {.dst = 0}); });
      if (n > 1 && rank == 0) told([&] { recv_object_list(list, {.src = bad}); });
      std::vector<int> ranks(static_cast<std::size_t>(n));
      all_gather_object(ranks, rank);
      EXPECT_EQ(ranks.back(), n - 1) << "the group goes on";
    });
  }
}

TEST(ObjectCollectives, SayWhoseValueHasAnotherTypeAndGoOn) {
  world(3, [](int rank) {
    std::vector<int> numbers = {-1, -1, -1};
    std::vector<Object> objects(3);
    std::string words;
    if (rank == 0) {
      words = refusal([&] { all_gather_object(numbers, 0); });
      EXPECT_EQ(numbers, (std::vector<int>{-1, -1, -1})) << "all or nothing";
      EXPECT_TRUE(says(words, "the object of rank 2: at the top: expected i32, got text")) << words;
    } else {
      all_gather_object(objects, rank == 2 ? Object("two") : Object(1));
    }
    std::vector<int> list = {0, 0};
    if (rank == 1) {
      std::vector<Object> sent = {Object(1), Object(2.5)};
      broadcast_object_list(sent, {.src = 1});
    } else {
      words = refusal([&] { broadcast_object_list(list, {.src = 1}); });
      EXPECT_TRUE(says(words, "object 1 of rank 1: at the top: expected i32, got f64")) << words;
    }
    barrier();
  });
}

TEST(ObjectCollectives, SayWhenListsDifferInLengthAndGoOn) {
  world(3, [](int rank) {
    std::vector<int> list(rank == 2 ? 3 : 2, rank);
    if (rank == 2) {
      const auto words = refusal([&] { broadcast_object_list(list); });
      EXPECT_TRUE(says(words, "object_list has 3 entries here, rank 0 sent 2")) << words;
    } else {
      broadcast_object_list(list);
    }
    if (rank == 0) send_object_list(list, {.dst = 1});
    if (rank == 1) {
      std::vector<int> one(1);
      EXPECT_TRUE(says(refusal([&] { recv_object_list(one, {.src = 0}); }), "1 entries here, rank 0 sent 2"));
    }
    barrier();
  });
}

TEST(ObjectCollectives, EndWithTheirTimeoutWhenARankDoesNotCome) {
  world(2, [](int rank) {
    const std::vector<std::string> tried = {"tried"};
    if (rank == 1) return default_group()->store()->wait(tried);
    std::vector<int> list(2);
    refusal([&] { all_gather_object(list, 1, {.timeout = Milliseconds(50)}); }, ErrorKind::kTimeout);
    default_group()->store()->set("tried", to_bytes("1"));
  });
}

}  // namespace
}  // namespace lockstep
