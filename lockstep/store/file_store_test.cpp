// What FileStore promises beyond the contract: processes, the file's bytes, damage, and who removes it.
#include "lockstep/store/file_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/store/internal/file_log.h"
#include "lockstep/store/prefix_store.h"

namespace lockstep {
namespace {

constexpr Milliseconds kShort{30};
using Keys = std::vector<std::string>;

class FileStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "file_store_XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    path_ = folder_ + "/store";
    warnings = 0;
    set_log_sink([](LogLevel, std::string_view) { ++warnings; });
  }
  void TearDown() override {
    set_log_sink(nullptr);
    ::unlink(path_.c_str());
    ::rmdir(folder_.c_str());
  }

  bool exists() const { return ::access(path_.c_str(), F_OK) == 0; }
  std::string contents() const {
    std::ifstream in(path_, std::ios::binary);
    return (std::ostringstream() << in.rdbuf()).str();
  }
  void write(std::string_view bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  // A file with the keys "first" and "last", the latter's record being its end.
  std::string sample() {
    FileStore::open(path_)->set("first", "1");
    std::string bytes = contents();
    base::ByteWriter last;
    internal::encode_record(last, "/last", to_bytes("the last value"));
    bytes += as_text(last.view());
    write(bytes);
    return bytes;
  }

  static inline std::atomic<int> warnings = 0;  // log lines since the test began
  std::string folder_, path_;
};

// Runs `child_main` in a process of its own; it ends with 0 when that returned true.
pid_t start(const std::function<bool()>& child_main) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  bool good = false;
  try {
    good = child_main();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
  }
  ::_exit(good ? 0 : 1);
}

void expect_success(pid_t pid) {
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

Failure failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const DistStoreError& error) {
    return error.failure();
  }
  ADD_FAILURE() << "raised nothing";
  return {};
}

std::string u32(std::uint32_t n) {
  return std::string(reinterpret_cast<const char*>(&n), sizeof n);
}
std::string record(const std::string& key, const std::string& value) {
  return u32(static_cast<std::uint32_t>(key.size())) + key + u32(static_cast<std::uint32_t>(value.size())) +
         value;
}

// ---- processes ----

TEST_F(FileStoreTest, AddsAndQueuesOfManyProcessesAreAllKept) {
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    children.push_back(start([&, i] {
      auto store = FileStore::open(path_, {.n_users = 5});
      for (int n = 0; n < 50; ++n) {
        store->add("n", 1);
        store->queue_push("q", to_bytes(base::cat(i, ':', n)));
      }
      return true;
    }));
  }
  auto store = FileStore::open(path_, {.n_users = 5});
  std::map<char, std::vector<std::string>> taken;
  for (int n = 0; n < 200; ++n) {
    const std::string entry = to_text(store->queue_pop("q"));
    taken[entry[0]].push_back(entry.substr(2));
  }
  for (const pid_t child : children) expect_success(child);
  EXPECT_EQ(store->add("n", 0), 200);
  for (const auto& [child, entries] : taken) {
    for (int n = 0; n < 50; ++n) EXPECT_EQ(entries.at(static_cast<std::size_t>(n)), std::to_string(n));
  }
}

TEST_F(FileStoreTest, AProcessIsWokenByTheSetOfAnother) {
  const pid_t child = start([&] {
    auto store = FileStore::open(path_);
    store->set("question", "6 * 7");
    return to_text(store->get("answer")) == "42";
  });
  auto store = FileStore::open(path_);
  EXPECT_EQ(to_text(store->get("question")), "6 * 7");
  store->set("answer", "42");
  expect_success(child);
}

TEST_F(FileStoreTest, AHandleInheritedOverForkWorksAndDoesNotSignOff) {
  auto store = FileStore::open(path_, {.n_users = 1});
  expect_success(start([&] {
    for (int n = 0; n < 20; ++n) store->add("n", 1);
    store.reset();
    return true;
  }));
  EXPECT_TRUE(exists()) << "the child was never counted in";
  EXPECT_EQ(store->add("n", 1), 21);
}

TEST_F(FileStoreTest, AFullDiskIsAnErrorAndLosesNothing) {
  expect_success(start([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    auto store = FileStore::open(path_);
    store->set("small", "kept");
    try {
      store->set("large", std::string(8192, 'x'));
    } catch (const DistStoreError& error) {
      return std::string(error.what()).find(path_) != std::string::npos &&
             to_text(store->get("small")) == "kept" && store->add("n", 1) == 1;
    }
    return false;
  }));
  EXPECT_EQ(to_text(FileStore::open(path_)->get("small")), "kept");
}

// ---- the file ----

TEST_F(FileStoreTest, TheFileHoldsTheDocumentedRecords) {
  auto store = FileStore::open(path_);
  store->set("a", "bc");
  store->add("n", 7);
  store->delete_key("a");
  store->queue_push("q", to_bytes("x"));
  store->queue_pop("q");
  store.reset();
  EXPECT_EQ(contents(), record("refcount/", "1") + record("/a", "bc") + record("/n", "7") +
                            record("-/a", "") + record(">/q", "x") + record("</q", "") +
                            record("cleanup/", "1") + record("refcount/", "0"));
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(FileStoreTest, TheLastOfWorldSizeUsersRemovesTheFile) {
  auto one = FileStore::open(path_, {.n_users = 2});
  auto two = FileStore::open(path_, {.n_users = 2});
  auto clone = one->clone();
  one.reset();
  clone.reset();
  EXPECT_TRUE(exists());
  EXPECT_EQ(two->num_keys(), 1) << "users that left do not show among the keys";
  two.reset();
  EXPECT_FALSE(exists());
}

TEST_F(FileStoreTest, AFileIsKeptWhileUsersAreStillToCome) {
  FileStore::open(path_, {.n_users = 2})->set("key", "value");
  ASSERT_TRUE(exists());
  EXPECT_EQ(to_text(FileStore::open(path_, {.n_users = 2})->get("key")), "value");
  EXPECT_FALSE(exists());
}

TEST_F(FileStoreTest, AnUnknownNumberOfUsersKeepsTheFile) {
  FileStore::open(path_)->set("key", "value");
  EXPECT_TRUE(exists());
  EXPECT_EQ(to_text(FileStore::open(path_)->get("key")), "value");
}

TEST_F(FileStoreTest, SeveralStoresShareOneFileUnderPrefixes) {
  PrefixStore rpc("rpc", FileStore::open(path_, {.n_users = 2}));
  PrefixStore group("group", FileStore::open(path_, {.n_users = 2}));
  rpc.set("key", "of rpc");
  group.set("key", "of group");
  EXPECT_EQ(to_text(rpc.get("key")), "of rpc");
  EXPECT_EQ(to_text(group.get("key")), "of group");
  EXPECT_EQ(rpc.list_keys(), Keys{"key"});
}

TEST_F(FileStoreTest, AReaderWaitsForAFileThatIsAbsentForAWhile) {
  auto store = FileStore::open(path_);
  const std::string away = folder_ + "/away";
  ASSERT_EQ(::rename(path_.c_str(), away.c_str()), 0);
  const Failure failure = failure_of([&] { store->wait(Keys{"key"}, kShort); });
  EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
  auto value = std::async(std::launch::async, [&] { return to_text(store->get("key")); });
  std::this_thread::sleep_for(kShort);
  ASSERT_EQ(::rename(away.c_str(), path_.c_str()), 0);
  FileStore::open(path_)->set("key", "value");
  EXPECT_EQ(value.get(), "value");
}

// ---- errors ----

TEST_F(FileStoreTest, AMissingFolderIsAnErrorThatNamesThePath) {
  const std::string path = folder_ + "/no/such/folder";
  const Failure failure = failure_of([&] { FileStore::open(path); });
  EXPECT_EQ(failure.kind, ErrorKind::kSystem);
  EXPECT_NE(failure.message.find(path), std::string::npos);
}

TEST_F(FileStoreTest, WrongArgumentsAreUsageErrors) {
  EXPECT_EQ(failure_of([&] { FileStore::open(""); }).kind, ErrorKind::kUsage);
  EXPECT_EQ(failure_of([&] { FileStore::open(path_, {.n_users = 0}); }).kind, ErrorKind::kUsage);
  EXPECT_EQ(failure_of([&] { FileStore::open(path_, {.timeout = Milliseconds(0)}); }).kind,
            ErrorKind::kUsage);
  EXPECT_FALSE(exists());
  EXPECT_EQ(failure_of([&] { FileStore::open("/dev/null"); }).kind, ErrorKind::kUsage);
}

TEST_F(FileStoreTest, ALockThatIsNeverGivenBackEndsEveryCallAtItsTimeout) {
  auto store = FileStore::open(path_);
  store->set_timeout(kShort);
  base::Fd holder(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(holder.get(), LOCK_EX), 0);
  const Failure failure = failure_of([&] { store->set("key", "value"); });
  EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
  EXPECT_NE(failure.message.find(path_), std::string::npos);
  EXPECT_NE(failure.message.find("30 ms"), std::string::npos) << failure.message;
  EXPECT_EQ(failure_of([&] { store->get("key"); }).kind, ErrorKind::kTimeout);
  EXPECT_EQ(failure_of([&] { FileStore::open(path_, {.timeout = kShort}); }).kind, ErrorKind::kTimeout);
  holder.reset();
  store->set("key", "value");
  EXPECT_EQ(to_text(store->get("key")), "value");
}

TEST_F(FileStoreTest, AFileOfAnotherKindIsRefusedAndLeftAlone) {
  for (const std::string& bytes : {std::string("hi\n"), std::string(1, '\0'), std::string(1000, 'x'),
                                   record("/a", "b"), u32(9) + "refugees/", u32(0xffffffff)}) {
    write(bytes);
    EXPECT_EQ(failure_of([&] { FileStore::open(path_); }).kind, ErrorKind::kUsage);
    EXPECT_EQ(contents(), bytes);
  }
}

// ---- what others prepared ----

TEST_F(FileStoreTest, AFileThatOthersMayWriteIsRefused) {
  write(record("refcount/", "0"));
  for (const mode_t mode : {0620, 0602, 0666}) {
    ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
    const Failure failure = failure_of([&] { FileStore::open(path_); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_NE(failure.message.find("mode"), std::string::npos) << failure.message;
  }
  ASSERT_EQ(::chmod(path_.c_str(), 0644), 0);
  EXPECT_NO_THROW(FileStore::open(path_)->set("key", "value")) << "as torch makes it";
}

TEST_F(FileStoreTest, AFileThatBecomesWritableByOthersIsNotTrustedAnyLonger) {
  const auto store = FileStore::open(path_);
  store->set("key", "value");
  ASSERT_EQ(::chmod(path_.c_str(), 0666), 0);
  EXPECT_EQ(failure_of([&] { store->set("key", "other"); }).kind, ErrorKind::kUsage);
  ASSERT_EQ(::chmod(path_.c_str(), 0600), 0);
}

TEST_F(FileStoreTest, AFileOfAnotherUserIsRefused) {
  std::string path = "/proc/version";  // root's, where this user is not root
  if (::geteuid() == 0) {
    write(record("refcount/", "0"));
    path = path_;
    ASSERT_EQ(::chown(path_.c_str(), 65534, 65534), 0);
  }
  const Failure failure = failure_of([&] { FileStore::open(path); });
  EXPECT_NE(failure.message.find(path), std::string::npos) << failure.message;
}

TEST_F(FileStoreTest, ASymbolicLinkIsNotFollowed) {
  const std::string target = path_ + ".target";
  ASSERT_EQ(::symlink(target.c_str(), path_.c_str()), 0);
  const Failure failure = failure_of([&] { FileStore::open(path_); });
  EXPECT_NE(failure.message.find("symbolic link"), std::string::npos) << failure.message;
  EXPECT_NE(::access(target.c_str(), F_OK), 0) << "nothing was made where it points";
}

TEST_F(FileStoreTest, APipeInItsPlaceIsAnErrorAtOnce) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(failure_of([&] { FileStore::open(path_); }).kind, ErrorKind::kUsage);
}

TEST_F(FileStoreTest, AFileCutWhileInUseIsAnError) {
  auto store = FileStore::open(path_);
  store->set("key", "value");
  write("");
  EXPECT_EQ(failure_of([&] { store->get("other"); }).kind, ErrorKind::kSystem);
}

// ---- damage ----

TEST_F(FileStoreTest, ATornLastRecordIsIgnoredAndThenCutOff) {
  const std::string whole = sample();
  const std::size_t last = record("/last", "the last value").size();
  for (std::size_t missing = 1; missing < last; ++missing) {
    write(whole.substr(0, whole.size() - missing));
    auto store = FileStore::open(path_);
    EXPECT_EQ(to_text(store->get("first")), "1");
    EXPECT_FALSE(store->check(Keys{"last"}));
    store->set("next", "value");
    EXPECT_EQ(to_text(FileStore::open(path_)->get("next")), "value") << missing << " bytes were missing";
  }
  EXPECT_EQ(warnings, static_cast<int>(last - 1)) << "each cut is told once";
}

TEST_F(FileStoreTest, AReaderGoesOnBeforeATornRecordUntilItIsWhole) {
  const std::string whole = sample();
  write(whole.substr(0, whole.size() - record("/last", "the last value").size()));
  auto store = FileStore::open(path_);
  const std::string before = contents();
  const std::string next = record("/late", "here");
  write(before + next.substr(0, 7));
  EXPECT_FALSE(store->check(Keys{"late"}));
  write(before + next);
  EXPECT_EQ(to_text(store->get("late")), "here");
}

TEST_F(FileStoreTest, ATornFirstRecordIsCutOff) {
  write(record("refcount/", "1").substr(0, 11));
  auto store = FileStore::open(path_);
  EXPECT_EQ(store->add("n", 1), 1);
  EXPECT_TRUE(contents().starts_with(record("refcount/", "1") + record("/n", "1")));
}

TEST_F(FileStoreTest, ALengthOfFourGibibytesTakesNoMemory) {
  const std::string head = record("refcount/", "1") + record("/first", "1");
  write(head + u32(0xffffffff) + "/key");
  EXPECT_EQ(failure_of([&] { FileStore::open(path_); }).kind, ErrorKind::kUsage) << "no key is that long";
  write(head + u32(4) + "/key" + u32(0xffffffff) + "value");
  auto store = FileStore::open(path_);
  EXPECT_FALSE(store->check(Keys{"key"})) << "as a torn record";
  EXPECT_EQ(to_text(store->get("first")), "1");
}

TEST_F(FileStoreTest, DamagedBytesAreAnErrorOrATornRecordNeverWorse) {
  std::mt19937 random(20);
  const std::string whole = sample() + record(">/q", "entry") + record("</q", "") + record("</none", "");
  for (int round = 0; round < 300; ++round) {
    std::string bytes = whole;
    for (int flips = 0; flips < 3; ++flips) bytes[random() % bytes.size()] = static_cast<char>(random());
    write(bytes.substr(0, random() % (bytes.size() + 1)));
    try {
      auto store = FileStore::open(path_);
      store->set("after", "works");
      EXPECT_EQ(to_text(store->get("after")), "works");
    } catch (const DistStoreError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
    }
  }
}

}  // namespace
}  // namespace lockstep
