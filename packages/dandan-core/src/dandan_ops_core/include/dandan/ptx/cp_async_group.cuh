// Asynchronous copies from global to shared memory in groups, with zero fill (sm_80). Shared addresses are 32 bits wide.
#pragma once

#include <cstdint>

namespace dandan::ptx {

// Copies `bytes` (0 to 16) past L1 and fills up to 16 with zeros; both addresses are multiples of 16. With 0 bytes nothing is read.
__device__ __forceinline__ void cp_async_cg_16_zfill(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// The same of 4 bytes, through L1; both addresses are multiples of 4.
__device__ __forceinline__ void cp_async_ca_4_zfill(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Ends a group: the copies of this thread since the last one.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the kGroups newest groups of this thread are still on their way.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
  static_assert(kGroups >= 0);
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace dandan::ptx
