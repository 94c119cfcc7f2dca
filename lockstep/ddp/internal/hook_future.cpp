#include "lockstep/ddp/internal/hook_future.h"

#include <future>
#include <memory>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {

at::Tensor hook_result(const c10::ivalue::Future& future, const std::string& hook, const at::Tensor& like) {
  const c10::IValue value = future.constValue();
  at::Tensor result;
  if (value.isTensor()) {
    result = value.toTensor();
  } else if (value.isTensorList() && value.toTensorVector().size() == 1) {
    result = value.toTensorVector().front();
  } else {
    base::raise(ErrorKind::kUsage,
                base::cat("the communication hook ", hook,
                          " must give a future of one tensor, this one holds ", value.tagKind()));
  }
  if (!result.defined() || result.numel() != like.numel()) {
    base::raise(ErrorKind::kUsage,
                base::cat("the communication hook ", hook, " returned a tensor of ",
                          result.defined() ? result.numel() : 0, " elements for a bucket of ", like.numel()));
  }
  return result;
}

void await_hook(const GradFuture& future, Milliseconds timeout, const std::string& whose) {
  if (!future->completed() && timeout != kNoTimeout) {
    const auto over = std::make_shared<std::promise<void>>();
    future->addCallback([over](c10::ivalue::Future&) { over->set_value(); });
    if (over->get_future().wait_for(timeout) == std::future_status::timeout)
      base::raise(ErrorKind::kTimeout,
                  base::cat("the future of ", whose, " did not end within ", timeout.count(), " ms"));
  }
  future->waitAndThrow();
}

}  // namespace lockstep::internal
