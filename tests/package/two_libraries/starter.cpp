#include <lockstep/group/world.h>

extern "C" __attribute__((visibility("default"))) int begin() {
  lockstep::init_process_group();
  return lockstep::get_rank();
}
extern "C" __attribute__((visibility("default"))) int end() {
  lockstep::destroy_process_group();
  return 0;
}
