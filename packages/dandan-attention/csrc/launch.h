// Shared by the launchers of this package: the element type as a type, blocks and their shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include <dandan/host/launch.h>
#include <dandan/host/shared_memory.h>

#include "attention.h"

namespace dandan_attention {

// Calls f with a value of the element type.
template <typename F>
void dispatch(DType dtype, F&& f) {
  return dtype == DType::kHalf ? f(__half{}) : f(__nv_bfloat16{});
}

[[noreturn]] inline void no_configuration(const char* kernel, int config, int head_dim) {
  throw std::runtime_error(std::string("RuntimeError: ") + kernel + " has no configuration " + std::to_string(config) + " for head_dim " +
                           std::to_string(head_dim));
}

}  // namespace dandan_attention
