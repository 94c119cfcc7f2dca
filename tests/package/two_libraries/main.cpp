#include <dlfcn.h>

#include <cstdio>

namespace {

int call(void* library, const char* name) {
  const auto function = library != nullptr ? reinterpret_cast<int (*)()>(::dlsym(library, name)) : nullptr;
  if (function == nullptr) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    return -2;
  }
  return function();
}

}  // namespace

int main() {
  void* const starter = ::dlopen(STARTER, RTLD_NOW | RTLD_LOCAL);
  void* const user = ::dlopen(USER, RTLD_NOW | RTLD_LOCAL);
  const int rank = call(starter, "begin");
  const bool shared = rank >= 0 && call(user, "rank") == rank && call(user, "init_again") == 1;
  return call(starter, "end") == 0 && shared ? 0 : 1;
}
