#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "engines/nccl/nccl_api.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {
namespace {

using base::cat;
constexpr const char* kSoname = "libnccl.so.2";

// Paths of loaded objects whose file name begins with `prefix`.
std::vector<std::filesystem::path> loaded(const char* prefix) {
  struct Search {
    std::string prefix;
    std::vector<std::filesystem::path> found;
  } search{prefix, {}};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* context) {
        auto& mine = *static_cast<Search*>(context);
        const std::filesystem::path path = info->dlpi_name;
        if (path.filename().native().starts_with(mine.prefix)) mine.found.push_back(path);
        return 0;
      },
      &search);
  return search.found;
}

std::string last_dl_error() {
  const char* const text = ::dlerror();
  return text != nullptr ? text : "unknown error";
}

void* open_loaded() {
  if (void* const handle = ::dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return handle;
  for (const auto& path : loaded("libnccl.so")) {
    if (void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD)) return handle;
  }
  return nullptr;
}

// A second NCCL must not bind its own calls to the first: some of its symbols are called through the global table.
void* open_named(const char* path, std::string& why) {
  if (void* const same = ::dlopen(path, RTLD_NOW | RTLD_NOLOAD)) return same;
  const int deep = open_loaded() != nullptr ? RTLD_DEEPBIND : 0;
  void* const handle = ::dlopen(path, RTLD_NOW | RTLD_LOCAL | deep);
  if (handle == nullptr) why = cat("LOCKSTEP_NCCL_LIBRARY: ", last_dl_error());
  return handle;
}

void* open_beside_torch() {
  for (const char* const library : {"libtorch_cuda.so", "libtorch_cpu.so", "libc10.so"}) {
    for (const auto& path : loaded(library)) {
      const auto folder = path.parent_path();
      // Wheels: .../site-packages/torch/lib and .../site-packages/nvidia/nccl/lib.
      for (const auto& place : {folder, folder / "../../nvidia/nccl/lib"}) {
        if (void* const handle = ::dlopen((place / kSoname).c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
      }
    }
  }
  return nullptr;
}

void* open(std::string& why) {
  if (const char* const named = std::getenv("LOCKSTEP_NCCL_LIBRARY"); named != nullptr && *named != '\0')
    return open_named(named, why);
  if (void* const handle = open_loaded()) return handle;
  if (void* const handle = ::dlopen(kSoname, RTLD_NOW | RTLD_LOCAL)) return handle;
  why = last_dl_error();
  return open_beside_torch();
}

template <class Function>
bool take(void* handle, const char* symbol, Function& out) {
  out = reinterpret_cast<Function>(::dlsym(handle, symbol));
  return out != nullptr;
}

// The reason is empty on success.
std::string load(Library& library) {
  std::string why;
  void* const handle = open(why);
  if (handle == nullptr)
    return cat("NCCL was not found: ", why, " (LOCKSTEP_NCCL_LIBRARY may name its file)");
#define LOCKSTEP_NCCL_TAKE(member, symbol, result, arguments) \
  if (!take(handle, symbol, library.member)) return cat("this NCCL has no ", symbol);
  LOCKSTEP_NCCL_ENTRIES(LOCKSTEP_NCCL_TAKE)
#undef LOCKSTEP_NCCL_TAKE
  if (library.get_version(&library.version) != kSuccess) return "NCCL does not tell its version";
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(library.get_version), &info) != 0 && info.dli_fname != nullptr)
    library.path = info.dli_fname;
  if (library.version < kMinVersion)
    return cat("NCCL ", version_text(library.version), " (", library.path,
               ") is too old: ", version_text(kMinVersion), " or newer is needed");
  if (library.version >= kRevokeVersion) take(handle, "ncclCommRevoke", library.comm_revoke);
  return "";
}

}  // namespace

std::string version_text(int version) {
  return cat(version / 10000, '.', version / 100 % 100, '.', version % 100);
}

const Library* Library::find(std::string* why) {
  struct Answer {
    Library library{};
    std::string why;
  };
  static const Answer answer = [] {
    Answer made;
    try {
      made.why = load(made.library);
    } catch (const std::exception& error) {
      made.why = error.what();
    }
    return made;
  }();
  if (answer.why.empty()) return &answer.library;
  if (why != nullptr) *why = answer.why;
  return nullptr;
}

}  // namespace lockstep::nccl_plugin
