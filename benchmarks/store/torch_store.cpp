// libtorch's c10d::TCPStore with its libuv server.
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "benchmarks/store/measure.h"

namespace bench {
namespace {

class TorchStore {
 public:
  static std::unique_ptr<TorchStore> serve() {
    return std::make_unique<TorchStore>(
        c10d::TCPStoreOptions{.port = 0, .isServer = true, .waitWorkers = false});
  }
  static std::unique_ptr<TorchStore> connect(std::uint16_t port) {
    return std::make_unique<TorchStore>(c10d::TCPStoreOptions{.port = port, .waitWorkers = false});
  }
  explicit TorchStore(const c10d::TCPStoreOptions& options)
      : store_(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)) {}

  std::uint16_t port() const { return store_->getPort(); }
  void set(const std::string& key, const std::string& text) { store_->set(key, {text.begin(), text.end()}); }
  std::string get(const std::string& key) {
    const std::vector<std::uint8_t> value = store_->get(key);
    return {value.begin(), value.end()};
  }
  std::int64_t add(const std::string& key, std::int64_t amount) { return store_->add(key, amount); }

 private:
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

}  // namespace
}  // namespace bench

int main() {
  return bench::run_store_contender<bench::TorchStore>();
}
