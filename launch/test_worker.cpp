// A worker for the launcher's tests: meets the others in the launcher's store, as a training program would.
//
//   test_worker meet            waits for all ranks, prints "met <world size>"
//   test_worker lose <rank>     that rank kills itself once all are there; the others ignore SIGTERM, read
//                               from the store how it ended, print that, and end with 0
//   test_worker blame <rank>    that rank leaves and takes its time to return 3; meanwhile rank 0 dies of an
//                               uncaught kPeerLost, and the launcher has told so before the culprit is gone;
//                               others sleep
#include <signal.h>
#include <unistd.h>

#include <iostream>
#include <string>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/process/job_server.h"
#include "lockstep/store/tcp_store.h"

namespace {

using namespace lockstep;

void meet(Store& store, long world_size) {
  const std::string here = "here";
  const std::string all = "all";
  if (store.add(here, 1) == world_size) store.set(all, "");
  store.wait({&all, 1});
}

int blame(Store& store, long rank, int culprit) {
  if (rank == culprit) {
    store.get(process::exit_cause_key(0));
    return 3;
  }
  if (rank == 0) {
    base::raise({.kind = ErrorKind::kPeerLost,
                 .message = base::cat("all_reduce: rank ", culprit, " left the group"),
                 .peer = LostPeer{culprit, -1, "left the group"}});
  }
  for (;;) ::pause();
}

int work(const std::string& what, int lost) {
  const long rank = base::environment_int(base::EnvVar::kRank).value();
  const long world_size = base::environment_int(base::EnvVar::kWorldSize).value();
  const auto store = TcpStore::open(
      base::environment(base::EnvVar::kMasterAddr).value(),
      {.port = static_cast<std::uint16_t>(base::environment_int(base::EnvVar::kMasterPort).value()),
       .timeout = Milliseconds(60'000),
       .secret = JobSecret::from_environment()});
  if (what == "lose" && rank != lost) ::signal(SIGTERM, SIG_IGN);
  meet(*store, world_size);
  if (what == "meet") {
    std::cout << "met " << world_size << std::endl;
    return 0;
  }
  if (what == "blame") return blame(*store, rank, lost);
  if (rank == lost) ::raise(SIGKILL);
  std::cout << "rank " << lost << " " << to_text(store->get(process::exit_cause_key(lost))) << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return work(argc > 1 ? argv[1] : "", argc > 2 ? std::stoi(argv[2]) : -1);
  } catch (const lockstep::Error& error) {
    if (error.kind() == lockstep::ErrorKind::kPeerLost) throw;  // as a program that catches nothing
    std::cerr << error.what() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
