// A program of its own that uses lockstep's stores, without libtorch.
#include <lockstep/store/hash_store.h>

#include <thread>

int main() {
  lockstep::HashStore store;
  const auto other = store.clone();
  std::thread writer([&] { other->set("greeting", "hello"); });
  const bool arrived = lockstep::to_text(store.get("greeting")) == "hello";
  writer.join();
  return arrived ? 0 : 1;
}
