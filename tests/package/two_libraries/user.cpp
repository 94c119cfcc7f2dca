#include <lockstep/group/world.h>

extern "C" __attribute__((visibility("default"))) int rank() {
  return lockstep::get_rank();
}
// 1 when the library's error arrives here as the type it is.
extern "C" __attribute__((visibility("default"))) int init_again() {
  try {
    lockstep::init_process_group();
  } catch (const lockstep::Error& error) {
    return error.kind() == lockstep::ErrorKind::kUsage ? 1 : 0;
  }
  return 0;
}
