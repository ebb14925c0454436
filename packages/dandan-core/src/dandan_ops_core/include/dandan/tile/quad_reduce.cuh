// Maximum and sum over the four lanes of a quad, which have a row of a tensor core's result together. All lanes of the warp take part, each gets it.
#pragma once

namespace dandan::tile {

// A NaN loses against a number.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

}  // namespace dandan::tile
