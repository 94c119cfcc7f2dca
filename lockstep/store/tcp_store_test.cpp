// TcpStore: the contract suite, with and without a secret, and what only a store over TCP has.
#include "lockstep/store/tcp_store.h"

#include "lockstep/store/store_contract.h"

namespace lockstep {
namespace {

TcpStoreOptions master() {
  return {.port = 0, .is_master = true};
}

class TcpWorld : public StoreWorld {
 public:
  explicit TcpWorld(TcpStoreOptions options)
      : options_(options), server_(TcpStore::open("127.0.0.1", options)) {
    options_.port = server_->port();
    options_.is_master = false;
    options_.world_size.reset();
  }
  std::shared_ptr<Store> open() override { return TcpStore::open("127.0.0.1", options_); }

 private:
  TcpStoreOptions options_;
  std::unique_ptr<TcpStore> server_;
};

INSTANTIATE_TEST_SUITE_P(Tcp, StoreContract,
                         testing::Values(StoreKind{"TcpStore_open",
                                                   [] { return std::make_unique<TcpWorld>(master()); }},
                                         StoreKind{"TcpStore_secret",
                                                   [] {
                                                     TcpStoreOptions options = master();
                                                     options.secret = JobSecret::mint();
                                                     return std::make_unique<TcpWorld>(options);
                                                   }},
                                         StoreKind{"TcpStore_world",
                                                   [] {
                                                     TcpStoreOptions options = master();
                                                     options.world_size = 1;
                                                     return std::make_unique<TcpWorld>(options);
                                                   },
                                                   1}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace lockstep
