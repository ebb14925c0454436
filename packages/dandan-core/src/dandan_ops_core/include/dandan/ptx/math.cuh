// Approximations of the special function unit (sm_75). Subnormal arguments and results count as zero.
#pragma once

namespace dandan::ptx {

// 2^x, to about 2 in the last place; 0 of -inf, inf of inf.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, to 1 in the last place; 0 of inf.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dandan::ptx
