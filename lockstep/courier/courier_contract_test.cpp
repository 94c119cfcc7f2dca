// The contract suite over every courier there is, workers as threads of one process.
#include "lockstep/courier/courier_contract.h"

#include "lockstep/courier/host_courier.h"
#include "lockstep/courier/local_courier.h"

namespace lockstep::courier {
namespace {

CourierOpener local_world() {
  return [exchange = LocalExchange::create()](WorkerId id) { return exchange->join(id); };
}

std::function<CourierOpener()> host_world(Transport transport, bool with_secret) {
  return [=]() -> CourierOpener {
    const auto secret = with_secret ? std::optional(JobSecret::mint()) : std::nullopt;
    return [=](WorkerId id) {
      return open_host_courier(
          {.id = id, .name = "worker" + std::to_string(id), .secret = secret, .transport = transport});
    };
  };
}

INSTANTIATE_TEST_SUITE_P(Couriers, CourierContract,
                         testing::Values(CourierKind{"Local", local_world},
                                         CourierKind{"SharedMemory", host_world(Transport::kAuto, false)},
                                         CourierKind{"SharedMemoryWithSecret",
                                                     host_world(Transport::kAuto, true)},
                                         CourierKind{"Tcp", host_world(Transport::kTcp, false)},
                                         CourierKind{"TcpWithSecret", host_world(Transport::kTcp, true)}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace lockstep::courier
