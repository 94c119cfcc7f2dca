// The store benchmark, the same for every store. Rank 0 holds the server and speaks with the harness; the
// other ranks are clients, each a process with one connection. Every call waits for its answer where the
// store gives one; a loop of set ends with one get inside the clock, so that requests still queued count.
//
// StoreApi: StoreApi::serve() opens the server on a free loopback port; StoreApi::connect(port) a client;
// both give an object with port(), set(key, text), get(key) -> std::string and add(key, amount) ->
// std::int64_t.
#pragma once

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/common/shared_array.h"

namespace bench {

inline constexpr int kMaxClients = 4;

struct ClientCount {
  std::int64_t operations = 0;
  std::int64_t took_ns = 0;
  bool right = true;
};

// Repeats `operation` until `end_ns`; each call gets its number.
template <class Operation>
std::int64_t repeat_until(std::int64_t end_ns, Operation operation) {
  std::int64_t n = 0;
  while (now_ns() < end_ns) operation(n++);
  return n;
}

template <class StoreApi>
ClientCount run_client(StoreApi& store, int rank, const std::string& op, std::int64_t budget_ns) {
  const std::string own_key = "key" + std::to_string(rank);
  const std::string value = "eight by";
  store.set(own_key, value);
  if (store.get(own_key) != value) return {.right = false};

  ClientCount count;
  const std::int64_t start = now_ns();
  const std::int64_t end = start + budget_ns;
  if (op == "get") {
    count.operations = repeat_until(
        end, [&](std::int64_t) { count.right = store.get(own_key).size() == value.size() && count.right; });
  } else if (op == "set") {
    count.operations = repeat_until(end, [&](std::int64_t n) { store.set(own_key, std::to_string(n)); });
    count.right = store.get(own_key) == std::to_string(count.operations - 1);
  } else if (op == "add") {
    count.operations = repeat_until(end, [&](std::int64_t) { store.add("counter", 1); });
  } else {
    throw std::runtime_error("no operation named " + op);
  }
  count.took_ns = now_ns() - start;
  return count;
}

template <class StoreApi>
class StoreContender {
 public:
  StoreContender(Link& link, SharedArray<ClientCount>& counts) : link_(link), counts_(counts) {
    if (link.rank() == 0) store_ = StoreApi::serve();
    const auto port = static_cast<std::uint16_t>(link.share_number(store_ ? store_->port() : 0));
    if (!store_) store_ = StoreApi::connect(port);
    link.all(true);
  }

  std::string measure(const Request& request) {
    const auto n_clients = static_cast<int>(request.number("clients"));
    const std::string& op = request.text("op");
    const int rank = link_.rank();
    const std::int64_t before = rank == 0 ? store_->add("counter", 0) : 0;
    link_.share("go");
    if (rank >= 1 && rank <= n_clients) {
      counts_[static_cast<std::size_t>(rank)] =
          run_client(*store_, rank, op, request.number("budget_ms") * 1'000'000);
    }
    link_.all(true);
    return rank == 0 ? answer(op, n_clients, store_->add("counter", 0) - before) : "";
  }

 private:
  std::string answer(const std::string& op, int n_clients, std::int64_t counted) {
    double per_s = 0;
    std::int64_t operations = 0;
    for (int rank = 1; rank <= n_clients; ++rank) {
      const ClientCount& count = counts_[static_cast<std::size_t>(rank)];
      if (!count.right) throw std::runtime_error("the store gave a wrong value");
      operations += count.operations;
      per_s += static_cast<double>(count.operations) * 1e9 / static_cast<double>(count.took_ns);
    }
    if (op == "add" && counted != operations) throw std::runtime_error("the store lost additions");
    std::ostringstream text;
    text.precision(9);
    text << "{\"us\":" << n_clients * 1e6 / per_s << ",\"per_s\":" << per_s
         << ",\"iterations\":" << operations << "}";
    return text.str();
  }

  Link& link_;
  SharedArray<ClientCount>& counts_;
  std::unique_ptr<StoreApi> store_;
};

template <class StoreApi>
int run_store_contender() {
  SharedArray<ClientCount> counts(kMaxClients + 1);
  const auto link = fork_ranks(kMaxClients + 1);
  StoreContender<StoreApi> contender(*link, counts);
  return serve(*link, [&](const Request& request) { return contender.measure(request); });
}

}  // namespace bench
