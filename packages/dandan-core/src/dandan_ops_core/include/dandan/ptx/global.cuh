// Global memory accesses of 16 bytes.
#pragma once

#include <cstdint>

namespace dandan::ptx {

// Loads 16 bytes; `address` is a multiple of 16. Not the read-only path, since an output may alias an input.
__device__ __forceinline__ uint4 ld_global_v4(const void* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// The same where `take` is true, `otherwise` elsewhere, without a branch: a thread's loads stay together.
__device__ __forceinline__ uint4 ld_global_v4_if(bool take, const void* address, uint4 otherwise) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+r"(otherwise.x), "+r"(otherwise.y), "+r"(otherwise.z), "+r"(otherwise.w)
      : "l"(address), "r"(static_cast<uint32_t>(take))
      : "memory");
  return otherwise;
}

// The same without a place in L1.
__device__ __forceinline__ uint4 ld_global_L1_no_allocate_v4_if(bool take, const void* address, uint4 otherwise) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+r"(otherwise.x), "+r"(otherwise.y), "+r"(otherwise.z), "+r"(otherwise.w)
      : "l"(address), "r"(static_cast<uint32_t>(take))
      : "memory");
  return otherwise;
}

// a * b + c of 32 times 32 bits into 64: one instruction.
__device__ __forceinline__ int64_t mad_wide(int a, int b, int64_t c) {
  int64_t d;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(c));
  return d;
}

// Stores 16 bytes; `address` is a multiple of 16.
__device__ __forceinline__ void st_global_v4(void* address, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace dandan::ptx
