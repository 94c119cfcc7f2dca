// Does not compile, and says why: a plain optimizer in join's list (see CMakeLists.txt).
#include "lockstep/join/join.h"

struct Model final : lockstep::Joinable {
  const lockstep::Group& join_group() const override { return group; }
  bool shadow_iteration() override { return true; }
  lockstep::Group group;
};
struct PlainOptimizer {};

int main() {
  Model model;
  PlainOptimizer optimizer;
  lockstep::join({model, optimizer}, [] {});
}
