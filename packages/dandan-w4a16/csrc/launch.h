// Shared by the launchers of this package: element type and group size as types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <dandan/host/launch.h>
#include <dandan/host/shared_memory.h>

#include "w4a16.h"

namespace dandan_w4a16 {

// Calls f with a value of the element type and the group size as a std::integral_constant.
template <typename F>
void dispatch(DType dtype, int group, F&& f) {
  const auto of = [&](auto element) {
    switch (group) {
      case 32: return f(element, std::integral_constant<int, 32>{});
      case 64: return f(element, std::integral_constant<int, 64>{});
      case 128: return f(element, std::integral_constant<int, 128>{});
      default: throw std::runtime_error("RuntimeError: no kernel for groups of " + std::to_string(group));
    }
  };
  return dtype == DType::kHalf ? of(__half{}) : of(__nv_bfloat16{});
}

[[noreturn]] inline void no_configuration(const char* kernel, const Tile& tile) {
  throw std::runtime_error(std::string("RuntimeError: ") + kernel + " has no configuration " + std::to_string(tile.config) + " with " +
                           std::to_string(tile.split) + " slices");
}

}  // namespace dandan_w4a16
