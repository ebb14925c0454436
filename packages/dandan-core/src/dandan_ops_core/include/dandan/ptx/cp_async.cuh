// Asynchronous copies from global to shared memory (sm_80).
#pragma once

#include <cstdint>

namespace dandan::ptx {

// Copies 16 bytes past L1; both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_cg_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
}

// Waits for every copy that this thread has issued.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace dandan::ptx
