// main and the main loop of a contender: a request comes in on rank 0's standard input, every rank handles
// it, rank 0 prints the answer. Between requests all ranks sleep.
#pragma once

#include <exception>
#include <iostream>
#include <string>

#include "benchmarks/common/link.h"
#include "benchmarks/common/request.h"

namespace bench {

// main: what `run(arguments)` returns; 1 when it throws, with the program's name and the reason on stderr.
template <class Run>
int run_main(int argc, char** argv, Run run) {
  try {
    return run(arguments(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << argv[0] << ": " << error.what() << std::endl;
    return 1;
  }
}

// What `body()` returns; 1 when it throws, after rank 0 has told the harness why. For what comes before serve
// and may fail.
template <class Body>
int guarded(Link& link, Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    if (link.rank() == 0) {
      std::cout << error_reply(error.what()) << std::endl;
    } else {
      std::cerr << "rank " << link.rank() << ": " << error.what() << std::endl;
    }
    return 1;
  }
}

// `handle(request)` runs on every rank and returns the answer, of which rank 0's is printed. Returns main's
// exit code: a contender that failed once is of no more use, since its ranks may not agree any longer.
template <class Handle>
int serve(Link& link, Handle handle) {
  const bool speaks = link.rank() == 0;
  return guarded(link, [&] {
    if (speaks) std::cout << "{\"ready\":true}" << std::endl;
    for (;;) {
      std::string line;
      if (speaks && !std::getline(std::cin, line)) line = "quit";
      line = link.share(line);
      if (line == "quit") return 0;
      const std::string answer = handle(Request(line));
      if (speaks) std::cout << answer << std::endl;
    }
  });
}

}  // namespace bench
