// Shared by the launchers of this package: the element type as a type, grid and block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>

#include <dandan/host/launch.h>

#include "norm.h"

namespace dandan_norm {

// Calls f with a value of the element type.
template <typename F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kHalf: return f(__half{});
    case DType::kBFloat16: return f(__nv_bfloat16{});
    case DType::kFloat: return f(float{});
  }
}

// One block for each `tile.rows` rows, or as many as a grid can have: kernels for any shape loop.
inline dandan::host::LaunchConfig row_config(int64_t rows, const Launch& launch) {
  const int64_t blocks = std::min<int64_t>((rows + launch.tile.rows - 1) / launch.tile.rows, 0x7fffffff / launch.tile.cluster);
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks * launch.tile.cluster));
  config.block = dim3(static_cast<unsigned>(launch.tile.threads), static_cast<unsigned>(launch.tile.rows));
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.cluster = launch.tile.cluster;
  return config;
}

}  // namespace dandan_norm
