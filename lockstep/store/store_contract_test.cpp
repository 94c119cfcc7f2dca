// The contract suite over the stores that need no network.
#include "lockstep/store/store_contract.h"

#include <stdlib.h>
#include <unistd.h>

#include "lockstep/store/file_store.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/store/prefix_store.h"

namespace lockstep {
namespace {

class HashWorld final : public StoreWorld {
 public:
  std::shared_ptr<Store> open() override { return store_.clone(); }

 private:
  HashStore store_;
};

class FileWorld final : public StoreWorld {
 public:
  FileWorld() {
    path_ = testing::TempDir() + "store_contract_XXXXXX";
    const int fd = ::mkstemp(path_.data());  // an empty file is as good as none
    if (fd >= 0) ::close(fd);
  }
  ~FileWorld() override { ::unlink(path_.c_str()); }
  std::shared_ptr<Store> open() override { return FileStore::open(path_); }

 private:
  std::string path_;
};

template <class Inner>
class PrefixWorld final : public StoreWorld {
 public:
  std::shared_ptr<Store> open() override { return std::make_shared<PrefixStore>("outer/in", inner_.open()); }

 private:
  Inner inner_;
};

template <class World>
StoreKind kind(std::string name, std::int64_t bookkeeping_keys, bool extended_api) {
  return {std::move(name), [] { return std::make_unique<World>(); }, bookkeeping_keys, extended_api};
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContract,
                         testing::Values(kind<HashWorld>("HashStore", 0, true),
                                         kind<FileWorld>("FileStore", 1, false),
                                         kind<PrefixWorld<HashWorld>>("PrefixStore_HashStore", 0, true),
                                         kind<PrefixWorld<FileWorld>>("PrefixStore_FileStore", 1, false)),
                         [](const auto& test) { return test.param.name; });

TEST(HashStore, RefusesATimeoutOfZeroOrLess) {
  EXPECT_THROW(HashStore({.timeout = Milliseconds(0)}), DistStoreError);
  EXPECT_THROW(HashStore({.timeout = Milliseconds(-1)}), DistStoreError);
  EXPECT_EQ(HashStore({.timeout = kNoTimeout}).timeout(), kNoTimeout);
}

}  // namespace
}  // namespace lockstep
