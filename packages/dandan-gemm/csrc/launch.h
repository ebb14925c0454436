// Shared by the launchers of this package: element type and weight layout as types, blocks and their shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include <dandan/host/launch.h>
#include <dandan/host/shared_memory.h>

#include "gemm.h"

namespace dandan_gemm {

// Calls f with a value of the element type and whether the weight is transposed, as a std::bool_constant.
template <typename F>
void dispatch(DType dtype, bool weight_transposed, F&& f) {
  const auto layout = [&](auto element) { return weight_transposed ? f(element, std::true_type{}) : f(element, std::false_type{}); };
  return dtype == DType::kHalf ? layout(__half{}) : layout(__nv_bfloat16{});
}

[[noreturn]] inline void no_configuration(const char* kernel, int config) {
  throw std::runtime_error(std::string("RuntimeError: ") + kernel + " has no configuration " + std::to_string(config));
}

}  // namespace dandan_gemm
