// The contract suite over every transport there is, workers as threads of one process.
#include "lockstep/transport/transport_contract.h"

#include "lockstep/transport/in_process_transport.h"
#include "lockstep/transport/worker_transport.h"

namespace lockstep::transport {
namespace {

TransportOpener local_world() {
  return [exchange = InProcessExchange::create()](WorkerId id) { return exchange->join(id); };
}

std::function<TransportOpener()> host_world(Route route, bool with_secret) {
  return [=]() -> TransportOpener {
    const auto secret = with_secret ? std::optional(JobSecret::mint()) : std::nullopt;
    return [=](WorkerId id) {
      return open_worker_transport(
          {.id = id, .name = "worker" + std::to_string(id), .secret = secret, .route = route});
    };
  };
}

INSTANTIATE_TEST_SUITE_P(Transports, TransportContract,
                         testing::Values(TransportKind{"Local", local_world},
                                         TransportKind{"SharedMemory", host_world(Route::kAuto, false)},
                                         TransportKind{"SharedMemoryWithSecret",
                                                       host_world(Route::kAuto, true)},
                                         TransportKind{"Tcp", host_world(Route::kTcp, false)},
                                         TransportKind{"TcpWithSecret", host_world(Route::kTcp, true)}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace lockstep::transport
