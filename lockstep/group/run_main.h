// A wrapper for the main function of a rank: an uncaught exception ends the process in an orderly way, with a
// message, instead of SIGABRT.
//
//   int train(int argc, char** argv);
//   int main(int argc, char** argv) { return lockstep::run_main(train, argc, argv); }
//
// An uncaught exception is printed to stderr, each line prefixed with "[rank2]: " if the process has a rank,
// and written to TORCHELASTIC_ERROR_FILE if the launcher set it; the world is left with its text as the
// cause, so that the other ranks raise kPeerLost with that text; and the process exits with code 1.
// Thread safety: call it once, on one thread.
#pragma once

#include <functional>
#include <type_traits>
#include <utility>

namespace lockstep {

namespace internal {
// Does the above for the exception being handled and returns the exit code. Never throws.
int end_with_exception() noexcept;
}  // namespace internal

// Calls function(arguments...) and returns its result as the exit code: an int, or 0 for void.
template <class Function, class... Arguments>
int run_main(Function&& function, Arguments&&... arguments) {
  using Result = std::invoke_result_t<Function, Arguments...>;
  static_assert(std::is_void_v<Result> || std::is_same_v<Result, int>,
                "run_main takes a function that returns an exit code (int) or nothing");
  try {
    if constexpr (std::is_void_v<Result>) {
      std::invoke(std::forward<Function>(function), std::forward<Arguments>(arguments)...);
      return 0;
    } else {
      return std::invoke(std::forward<Function>(function), std::forward<Arguments>(arguments)...);
    }
  } catch (...) {
    return internal::end_with_exception();
  }
}

}  // namespace lockstep
