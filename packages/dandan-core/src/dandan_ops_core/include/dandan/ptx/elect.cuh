// One lane of a warp (sm_90).
#pragma once

#include <cstdint>

namespace dandan::ptx {

// True in one lane, always the same, of a warp whose lanes are all here. The compiler knows that it is one: what only that lane does needs no loop over
// lanes with different operands.
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected)::"memory");
  return elected != 0;
}

}  // namespace dandan::ptx
