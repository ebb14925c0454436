// The thread's number in its block.
#pragma once

namespace dandan::ptx {

// threadIdx.x, read anew at every call: an instruction instead of a register that a long loop would keep.
__device__ __forceinline__ int tid_x() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

}  // namespace dandan::ptx
