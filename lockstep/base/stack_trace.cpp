#include "lockstep/base/detail/stack_trace.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>

#include <cstdint>
#include <map>
#include <sstream>
#include <vector>

#include "lockstep/base/detail/demangle.h"
#include "lockstep/base/detail/environment.h"
#include "lockstep/base/internal/elf_symbols.h"

namespace lockstep::base {
namespace {

constexpr int kFrames = 64;
// The part of a loaded file that is compared: its headers and, in the usual section order, its build id.
constexpr std::size_t kImageBytes = 1024;

struct Frame {
  std::uintptr_t address = 0;  // return address of the call
  std::string name{};          // "" when unknown
  std::uintptr_t begin = 0;    // start of the function
  std::string file{};          // "" when not in a file
  std::uintptr_t base = 0;     // load address of the file
};

// The frames of one file that the dynamic linker has no name for (static and hidden functions, such as
// lockstep's own); its symbol table may have one. A function of a stripped or replaced file stays an offset,
// for addr2line.
struct Unknown {
  std::vector<Frame*> frames;
  std::vector<std::uint64_t> addresses;
  std::uintptr_t bias = 0;  // memory address minus file address
  const std::uint8_t* image = nullptr;
};

// A call that does not return may be the last instruction of its function; the return address then belongs to
// the next function.
void* call_of(std::uintptr_t address) {
  return reinterpret_cast<void*>(address - 1);
}

void ask_linker(Frame& frame, std::map<std::string, Unknown>& unknown) {
  Dl_info info{};
  link_map* map = nullptr;
  void* const call = call_of(frame.address);
  if (::dladdr1(call, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 || map == nullptr) return;
  frame.file = info.dli_fname == nullptr ? "?" : info.dli_fname;
  frame.base = reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  if (info.dli_sname != nullptr) {
    frame.name = info.dli_sname;
    frame.begin = reinterpret_cast<std::uintptr_t>(info.dli_saddr);
    return;
  }
  // The program itself has no name here, and its path may be relative to its initial working directory.
  const bool program = map->l_name == nullptr || map->l_name[0] == '\0';
  Unknown& file = unknown[program ? "/proc/self/exe" : map->l_name];
  file.frames.push_back(&frame);
  file.addresses.push_back(reinterpret_cast<std::uintptr_t>(call) - map->l_addr);
  file.bias = map->l_addr;
  file.image = static_cast<const std::uint8_t*>(info.dli_fbase);
}

void ask_files(const std::map<std::string, Unknown>& unknown) {
  for (const auto& [path, file] : unknown) {
    const auto found = internal::functions_at(path, file.addresses, {file.image, kImageBytes});
    for (std::size_t i = 0; i < found.size(); ++i) {
      file.frames[i]->name = found[i].name;
      file.frames[i]->begin = found[i].begin + file.bias;
    }
  }
}

void write_frame(std::ostream& out, const Frame& frame) {
  if (frame.file.empty()) {
    out << "0x" << frame.address;
    return;
  }
  if (!frame.name.empty())
    out << demangle(frame.name.c_str()) << " +0x" << frame.address - frame.begin << ' ';
  out << '(' << frame.file.substr(frame.file.rfind('/') + 1) << "+0x" << frame.address - frame.base << ')';
}

}  // namespace

std::string stack_trace(int skip) {
  void* addresses[kFrames];
  const int n = ::backtrace(addresses, kFrames);
  std::vector<Frame> frames;
  for (int i = 1 + skip; i < n; ++i)
    frames.push_back({.address = reinterpret_cast<std::uintptr_t>(addresses[i])});
  std::map<std::string, Unknown> unknown;
  for (Frame& frame : frames) ask_linker(frame, unknown);
  ask_files(unknown);
  std::ostringstream out;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    out << '#' << std::dec << i << std::hex << ' ';
    write_frame(out, frames[i]);
    out << '\n';
  }
  return out.str();
}

std::string stack_trace_if_asked() {
  if (!environment_flag(EnvVar::kShowCppStacktraces)) return "";
  return "\nC++ stack, innermost first:\n" + stack_trace(1);
}

}  // namespace lockstep::base
