#include "lockstep/group/run_main.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <typeinfo>

#include "lockstep/base/detail/demangle.h"
#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/group/internal/worlds.h"
#include "lockstep/group/world.h"

namespace lockstep::internal {
namespace {

struct Uncaught {
  std::string type;  // "std::runtime_error"
  std::string text;
};

// libtorch's errors carry a stack, which is shown when it was asked for.
Uncaught describe_current() {
  try {
    throw;
  } catch (const c10::Error& error) {
    const bool whole = base::environment_flag(base::EnvVar::kShowCppStacktraces);
    return {base::demangle(typeid(error).name()), whole ? error.what() : error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {base::demangle(typeid(error).name()), error.what()};
  } catch (...) {
    return {"unknown", "an exception that is not a std::exception"};
  }
}

// "[rank2]: ", from the world or, before it is entered, from the launcher; "" without either.
std::string prefix() {
  if (current_worlds().group()) return base::cat("[rank", get_rank(), "]: ");
  const auto rank = base::environment(base::EnvVar::kRank);
  return rank ? base::cat("[rank", *rank, "]: ") : "";
}

void print(const Uncaught& error) {
  const std::string lead = prefix();
  std::istringstream lines(base::cat(error.type, ": ", error.text));
  std::string text;
  for (std::string line; std::getline(lines, line);) text += base::cat(lead, line, "\n");
  std::fputs(text.c_str(), stderr);  // in one piece: other ranks write to the same terminal
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += base::cat('\\', c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// In the form of torch's elastic workers.
void write_error_file(const Uncaught& error) {
  const auto path = base::environment(base::EnvVar::kElasticErrorFile);
  if (!path) return;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::ofstream file(*path, std::ios::trunc);
  file << "{\"message\": {\"message\": " << json_string(base::cat(error.type, ": ", error.text))
       << ", \"extraInfo\": {\"timestamp\": \""
       << std::chrono::duration_cast<std::chrono::seconds>(now).count() << "\"}}}\n";
}

}  // namespace

int end_with_exception() noexcept {
  try {
    const Uncaught error = describe_current();
    std::cout.flush();  // what the program had said comes before its end
    std::fflush(stdout);
    print(error);
    write_error_file(error);
    current_worlds().leave_all(base::cat("threw: ", error.text));
  } catch (...) {
    std::fputs("lockstep: an exception ended this rank, and another one its report\n", stderr);
  }
  return 1;
}

}  // namespace lockstep::internal
