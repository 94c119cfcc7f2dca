// A library that uses lockstep and exports three calls in C: each returns null, or the words of the error.
#include <string>

#include "lockstep/group/world.h"

namespace {

template <class Fn>
const char* words_of(const Fn& fn) {
  static std::string words;
  try {
    fn();
    return nullptr;
  } catch (const lockstep::Error& error) {
    words = error.what();
    return words.c_str();
  }
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) const char* copy_init() {
  return words_of([] { lockstep::init_process_group(); });
}
__attribute__((visibility("default"))) const char* copy_rank() {
  return words_of([] { lockstep::get_rank(); });
}
__attribute__((visibility("default"))) const char* copy_destroy() {
  return words_of([] { lockstep::destroy_process_group(); });
}
}
