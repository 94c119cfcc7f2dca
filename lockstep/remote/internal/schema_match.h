// Fits values to an operator's schema.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include "lockstep/remote/operator.h"

namespace lockstep::rpc::internal {

// "aten::mm(Tensor self, Tensor mat2) -> Tensor".
std::string schema_text(const c10::FunctionSchema& schema);
// The arguments as the boxed kernel wants them. Raises kUsage naming the parameter and showing the schema.
torch::jit::Stack match_schema(const c10::FunctionSchema& schema, const std::vector<OperatorArg>& args);

}  // namespace lockstep::rpc::internal
