// Dynamic groups whose workers die: in the middle of a change, several at once, and under a name that comes
// back.
#include "lockstep/rpc/internal/membership.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/rpc/internal/shutdown_barrier.h"
#include "lockstep/rpc/rpc_testing.h"
#include "lockstep/store/hash_store.h"

namespace lockstep::rpc::internal {
namespace {

using namespace std::chrono_literals;
using testing::caught;
using testing::says;
using testing::until;

// A store for one worker, which dies at some operation on it: that one and all later ones fail.
class MortalStore final : public Store {
 public:
  struct Life {
    std::atomic<int> n_left{1 << 30};
    std::string last_words{};  // it dies before it sets this key
  };
  MortalStore(std::shared_ptr<Store> inner, std::shared_ptr<Life> life, bool counts)
      : inner_(std::move(inner)), life_(std::move(life)), counts_(counts) {}

  using Store::set;
  void set(const std::string& key, std::span<const std::uint8_t> value) override {
    if (key == life_->last_words) life_->n_left = 0;
    alive().set(key, value);
  }
  Bytes get(const std::string& key) override { return alive().get(key); }
  std::int64_t add(const std::string& key, std::int64_t amount) override { return alive().add(key, amount); }
  Bytes compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                    std::span<const std::uint8_t> desired) override {
    return alive(false).compare_set(key, expected, desired);
  }
  // Looks at what is not there yet are not counted: how many there are is not known.
  bool check(std::span<const std::string> keys) override {
    const bool there = alive(false).check(keys);
    if (there) alive();
    return there;
  }
  void wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout) override {
    alive(false).wait(keys, timeout);
    alive();
  }
  bool delete_key(const std::string& key) override { return alive().delete_key(key); }
  std::int64_t num_keys() override { return alive().num_keys(); }
  std::vector<std::string> list_keys() override { return alive().list_keys(); }
  void append(const std::string& key, std::span<const std::uint8_t> value) override {
    alive().append(key, value);
  }
  std::vector<Bytes> multi_get(std::span<const std::string> keys) override { return alive().multi_get(keys); }
  void multi_set(std::span<const std::string> keys, std::span<const Bytes> values) override {
    alive().multi_set(keys, values);
  }
  void queue_push(const std::string& key, std::span<const std::uint8_t> value) override {
    alive().queue_push(key, value);
  }
  Bytes queue_pop(const std::string& key) override { return alive().queue_pop(key); }
  std::optional<Bytes> try_queue_pop(const std::string& key) override { return alive().try_queue_pop(key); }
  std::int64_t queue_len(const std::string& key) override { return alive().queue_len(key); }
  // Of the thread that watches: it dies with the worker, and does not count.
  std::unique_ptr<Store> clone() override {
    return std::make_unique<MortalStore>(inner_->clone(), life_, false);
  }
  bool has_extended_api() const override { return inner_->has_extended_api(); }
  void set_timeout(Milliseconds timeout) override { inner_->set_timeout(timeout); }
  Milliseconds timeout() const override { return inner_->timeout(); }
  std::string describe() const override { return inner_->describe(); }

 private:
  // Nor are attempts at the membership lock.
  Store& alive(bool counts = true) {
    const int n_left = counts_ && counts ? life_->n_left.fetch_sub(1) : life_->n_left.load();
    if (n_left <= 0) base::raise(ErrorKind::kAborted, "this worker is dead");
    return *inner_;
  }
  const std::shared_ptr<Store> inner_;
  const std::shared_ptr<Life> life_;
  const bool counts_;
};

struct Member {
  std::shared_ptr<Agent> agent;
  std::unique_ptr<DynamicGroup> group;
};

// Workers of one group, as objects of one thread.
class Town {
 public:
  explicit Town(Patience patience) : patience_(patience) {}
  ~Town() {
    for (auto& [name, member] : members_) end(member);
  }

  std::shared_ptr<Store> store() const { return store_; }
  Agent& agent(const std::string& name) { return *members_.at(name).agent; }
  void join(const std::string& name, WorkerId id) { join(name, id, store_->clone()); }
  void join(const std::string& name, WorkerId id, std::shared_ptr<Store> store) {
    auto agent =
        Agent::start({.self = {.id = id, .name = name}, .num_worker_threads = 2}, exchange_->join(id));
    members_[name].agent = agent;
    members_[name].group = DynamicGroup::join(store, agent, Deadline::after(60s), patience_);
  }
  void leave(const std::string& name) {
    members_.at(name).group->leave(Deadline::after(60s));
    forget(name);
  }
  // As SIGKILL does.
  void kill(const std::string& name) {
    exchange_->kill(agent(name).self().id, "killed by SIGKILL (9)");
    forget(name);
  }
  // It does not listen any more, and nobody is notified.
  void fall_silent(const std::string& name) { members_.at(name).group = nullptr; }
  void forget(const std::string& name) {
    end(members_.at(name));
    members_.erase(name);
  }

  // Everyone knows exactly these, and reaches them.
  void expect_everyone_knows(const std::set<std::string>& names) {
    for (const auto& name : names) {
      std::set<std::string> known;
      for (const auto& worker : agent(name).workers()) known.insert(worker.name);
      EXPECT_EQ(known, names) << "as " << name << " sees it";
      for (const auto& other : names) {
        EXPECT_EQ(agent(name).find(other), agent(other).self());
        ping(agent(name), agent(name).find(other).id, 30s).wait();
      }
    }
  }

 private:
  static void end(Member& member) {
    member.group = nullptr;
    if (member.agent) member.agent->close(0ms);
  }
  const Patience patience_;
  const std::shared_ptr<transport::InProcessExchange> exchange_ = transport::InProcessExchange::create();
  const std::shared_ptr<Store> store_ = std::make_shared<HashStore>();
  std::map<std::string, Member> members_;
};

// Its change is written, and noted by all, but not in the list.
void die_before_the_list_is_written(Town& town, const std::string& name, WorkerId id) {
  const auto life = std::make_shared<MortalStore::Life>();
  life->last_words = "state";
  EXPECT_THROW(town.join(name, id, std::make_shared<MortalStore>(town.store(), life, true)), Error);
  town.kill(name);
}

// Another worker dies at its n-th operation on the store while it joins or leaves. False: it needs fewer.
enum class While : std::uint8_t { kItJoins, kItLeaves, kItJoinsAfterADeath };
bool survive_death_at(int n, While when) {
  Town town({.lock = 200ms});
  town.join("a", 0);
  town.join("b", 1);
  if (when == While::kItJoinsAfterADeath) die_before_the_list_is_written(town, "first", 6);
  const auto life = std::make_shared<MortalStore::Life>();
  const auto store = std::make_shared<MortalStore>(town.store(), life, true);
  bool died = false;
  try {
    if (when != While::kItLeaves) life->n_left = n;
    town.join("mortal", 2, store);
    life->n_left = n;
    if (when == While::kItLeaves) town.leave("mortal");
  } catch (const Error&) {
    died = true;
  }
  life->n_left = 0;
  if (when != While::kItLeaves || died) town.kill("mortal");
  town.join("c", 3);
  town.expect_everyone_knows({"a", "b", "c"});
  town.join("mortal", 4);
  town.expect_everyone_knows({"a", "b", "c", "mortal"});
  town.leave("a");
  town.expect_everyone_knows({"b", "c", "mortal"});
  return died;
}

// Every operation there is.
void survive_every_death(While when) {
  constexpr int kOperations = 32;
  std::atomic<int> next{0}, n_deaths{0};
  std::vector<base::Thread> threads;
  for (int i = 0; i < 16; ++i) {  // each waits most of the time, for the lock of a dead worker to expire
    threads.emplace_back("town", [&] {
      for (int n = next++; n < kOperations; n = next++) {
        try {
          n_deaths += survive_death_at(n, when) ? 1 : 0;
        } catch (const Error& error) {
          ADD_FAILURE() << "after a death at operation " << n << ": " << error.what();
        }
      }
    });
  }
  threads.clear();
  EXPECT_GT(n_deaths, 8);
  EXPECT_LT(n_deaths, kOperations) << "there may be more operations than were tried";
}

TEST(DynamicGroup, CatchesUpWhenAWorkerDiesWhileItJoins) {
  survive_every_death(While::kItJoins);
}
TEST(DynamicGroup, CatchesUpWhenAWorkerDiesWhileItLeaves) {
  survive_every_death(While::kItLeaves);
}

TEST(DynamicGroup, CatchesUpWhenOneDiesAfterTheOther) {
  survive_every_death(While::kItJoinsAfterADeath);
}

TEST(DynamicGroup, KeepsChangesUntilTheListHasThem) {
  Town town({.lock = 200ms});
  town.join("a", 0);
  town.join("b", 1);
  die_before_the_list_is_written(town, "first", 2);
  die_before_the_list_is_written(town, "second", 3);
  town.join("c", 4);
  town.expect_everyone_knows({"a", "b", "c"});
}

TEST(DynamicGroup, TakesOffSeveralThatAreDeadOrSilent) {
  Town town({.tell = 3s});
  for (const auto& [name, id] :
       std::map<std::string, WorkerId>{{"a", 0}, {"b", 1}, {"c", 2}, {"d", 3}, {"e", 4}}) {
    town.join(name, id);
  }
  town.kill("b");
  town.kill("d");
  town.fall_silent("e");
  town.join("f", 5);
  town.expect_everyone_knows({"a", "c", "f"});
  town.leave("a");
  town.expect_everyone_knows({"c", "f"});
}

TEST(DynamicGroup, LetsAKilledWorkerComeBackUnderItsNameAndNumber) {
  Town town({});
  town.join("a", 0);
  town.join("b", 1);
  town.join("c", 2);
  town.kill("b");
  town.join("b", 3);
  town.expect_everyone_knows({"a", "b", "c"});
  town.kill("b");
  town.join("b", 3);
  town.expect_everyone_knows({"a", "b", "c"});
}

TEST(DynamicGroup, LetsTheOnlyWorkerComeBackAfterAWhile) {
  Town town({.tell = 1s});
  town.join("a", 0);
  town.kill("a");
  town.join("a", 1);
  town.expect_everyone_knows({"a"});
}

TEST(DynamicGroup, RefusesTheNameAndTheNumberOfAWorkerThatLives) {
  Town town({});
  town.join("a", 0);
  town.join("b", 1);
  Town other({});  // its own exchange: numbers may be the same there
  EXPECT_TRUE(says(caught([&] { other.join("a", 7, town.store()->clone()); }), "the name a is taken"));
  EXPECT_TRUE(
      says(caught([&] { other.join("x", 1, town.store()->clone()); }), "number 1 is taken by worker b"));
  town.expect_everyone_knows({"a", "b"});
  town.join("c", 2);
  town.expect_everyone_knows({"a", "b", "c"});
}

TEST(DynamicGroup, AssignsNumbersThatAreNeitherTakenNorRequested) {
  HashStore store;
  claim_number(store, 0);
  claim_number(store, 2);
  EXPECT_EQ(take_number(store), 1);
  EXPECT_EQ(take_number(store), 3);
  claim_number(store, 2);  // once more: it comes back
  EXPECT_TRUE(says(caught([&] { claim_number(store, 3); }), "number 3 was given"));
  EXPECT_EQ(take_number(store), 4);
}

}  // namespace
}  // namespace lockstep::rpc::internal
