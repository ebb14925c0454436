// Registers from one warp group of a block to another (sm_90a).
#pragma once

namespace dandan::ptx {

// Sets the registers of each thread of the executing warp group to kCount; it waits until the block has as many left.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(kCount >= 24 && kCount <= 256 && kCount % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The same for fewer; the others go back to the block.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(kCount >= 24 && kCount <= 256 && kCount % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace dandan::ptx
