// The contract suite of Store: what every store must do, written once in store_contract.cpp. A store is added
// by describing how to create one and compiling that file into its test program:
//
//   class MyWorld final : public StoreWorld {
//    public:
//     std::shared_ptr<Store> open() override { return MyStore::open(path_); }
//   };
//   INSTANTIATE_TEST_SUITE_P(MyStore, StoreContract,
//                            testing::Values(StoreKind{"MyStore", [] { return std::make_unique<MyWorld>(); }}));
//
//   lockstep_test(my_store_test SOURCES my_store_test.cpp store_contract.cpp DEPENDS store)
//
// For tests only; not installed.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/store/store.h"

namespace lockstep {

// Fresh, empty data and handles on it; lives for one test and outlives the handles.
class StoreWorld {
 public:
  virtual ~StoreWorld() = default;
  // A handle as one more rank would open it. Called from the test's main thread.
  virtual std::shared_ptr<Store> open() = 0;
};

struct StoreKind {
  std::string name;
  std::function<std::unique_ptr<StoreWorld>()> create;
  std::int64_t bookkeeping_keys = 0;  // what num_keys says when the user has set nothing
  bool extended_api = true;           // what has_extended_api must say

  friend std::ostream& operator<<(std::ostream& out, const StoreKind& kind) { return out << kind.name; }
};

class StoreContract : public testing::TestWithParam<StoreKind> {
 protected:
  using Keys = std::vector<std::string>;

  // Long enough for a slow machine, short enough to end a broken run.
  static constexpr Milliseconds kPatience{60'000};
  // For waits that are meant to fail.
  static constexpr Milliseconds kShort{30};

  void SetUp() override {
    world_ = GetParam().create();
    store_ = open();
  }

  std::shared_ptr<Store> open() {
    auto store = world_->open();
    store->set_timeout(kPatience);
    return store;
  }

  // Runs `call(store, index)` on `n` threads, each with a handle of its own, and waits for all of them.
  void on_threads(int n, const std::function<void(Store&, int)>& call) {
    std::vector<std::future<void>> running;
    for (int i = 0; i < n; ++i) {
      running.push_back(std::async(std::launch::async, [store = open(), i, &call] { call(*store, i); }));
    }
    for (auto& one : running) one.get();
  }

  // The error `call` raises, its class checked; fails the test when it raises none.
  template <class Class = DistStoreError>
  static Failure failure_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Class& error) {
      return error.failure();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "raised another class: " << error.what();
      return {};
    }
    ADD_FAILURE() << "raised nothing";
    return {};
  }

  static bool mentions(const Failure& failure, const std::string& text) {
    return failure.message.find(text) != std::string::npos;
  }

  // Gives a thread time to start waiting. No result may depend on it; it only makes the intended order
  // likely.
  static void let_it_wait() { std::this_thread::sleep_for(Milliseconds(15)); }

  std::unique_ptr<StoreWorld> world_;
  std::shared_ptr<Store> store_;
};

}  // namespace lockstep
