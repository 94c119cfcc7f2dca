// A program of its own that uses lockstep's stores, without libtorch.
#include <lockstep/base/error.h>
#include <lockstep/store/hash_store.h>

#include <chrono>
#include <thread>

namespace {

// Thrown in the library and caught here by its type, although this program has hidden symbols: type
// information of its own.
bool catches_by_type(lockstep::Store& store) {
  store.set_timeout(std::chrono::milliseconds(1));
  try {
    store.get("nobody sets this");
  } catch (const lockstep::DistNetworkError&) {
    return false;
  } catch (const lockstep::DistStoreError& error) {
    return error.kind() == lockstep::ErrorKind::kTimeout;
  }
  return false;
}

}  // namespace

int main() {
  lockstep::HashStore store;
  const auto other = store.clone();
  std::thread writer([&] { other->set("greeting", "hello"); });
  const bool arrived = lockstep::to_text(store.get("greeting")) == "hello";
  writer.join();
  return arrived && catches_by_type(store) ? 0 : 1;
}
