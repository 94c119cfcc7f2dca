// lockstep's TcpStore.
#include "benchmarks/store/measure.h"
#include "lockstep/store/tcp_store.h"

namespace bench {
namespace {

class LockstepStore {
 public:
  static std::unique_ptr<LockstepStore> serve() {
    return std::make_unique<LockstepStore>(lockstep::TcpStoreOptions{.port = 0, .is_master = true});
  }
  static std::unique_ptr<LockstepStore> connect(std::uint16_t port) {
    return std::make_unique<LockstepStore>(lockstep::TcpStoreOptions{.port = port});
  }
  explicit LockstepStore(lockstep::TcpStoreOptions options) {
    options.wait_for_workers = false;
    store_ = lockstep::TcpStore::open("127.0.0.1", options);
  }

  std::uint16_t port() const { return store_->port(); }
  void set(const std::string& key, const std::string& text) { store_->set(key, std::string_view(text)); }
  std::string get(const std::string& key) {
    const lockstep::Bytes value = store_->get(key);
    return {value.begin(), value.end()};
  }
  std::int64_t add(const std::string& key, std::int64_t amount) { return store_->add(key, amount); }

 private:
  std::unique_ptr<lockstep::TcpStore> store_;
};

}  // namespace
}  // namespace bench

int main() {
  return bench::run_store_contender<bench::LockstepStore>();
}
