// lockstep's TcpStore, with a job secret as in every real job. On one host its clients move to a local
// socket; with BENCH_STORE_TCP=1 they stay on TCP, where everything is sealed.
#include <cstdlib>

#include "benchmarks/store/measure.h"
#include "lockstep/store/tcp_store.h"

namespace bench {
namespace {

class LockstepStore {
 public:
  // Minted before the ranks are forked: main() calls it.
  static const lockstep::JobSecret& secret() {
    static const auto job = lockstep::JobSecret::mint();
    return job;
  }
  static std::unique_ptr<LockstepStore> serve() {
    return std::make_unique<LockstepStore>(lockstep::TcpStoreOptions{.port = 0, .is_master = true});
  }
  static std::unique_ptr<LockstepStore> connect(std::uint16_t port) {
    return std::make_unique<LockstepStore>(lockstep::TcpStoreOptions{.port = port});
  }
  explicit LockstepStore(lockstep::TcpStoreOptions options) {
    options.wait_for_workers = false;
    options.secret = secret();
    options.local_socket = std::getenv("BENCH_STORE_TCP") == nullptr;
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
  bench::LockstepStore::secret();
  return bench::run_store_contender<bench::LockstepStore>();
}
