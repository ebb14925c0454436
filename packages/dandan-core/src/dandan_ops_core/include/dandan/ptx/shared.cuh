// Shared memory accesses of 16 bytes by 32-bit shared address.
#pragma once

#include <cstdint>

namespace dandan::ptx {

// Stores 16 bytes; `address` is a multiple of 16.
__device__ __forceinline__ void st_shared_v4(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace dandan::ptx
