#include "lockstep/base/detail/rank_thread.h"

namespace lockstep::base {

RankThread*& this_rank_thread() {
  thread_local constinit RankThread* mine = nullptr;
  return mine;
}

}  // namespace lockstep::base
