// Copies of contiguous bytes by the copy engine (sm_90).
#pragma once

#include <cstdint>

namespace dandan::ptx {

// `bytes` from global to shared memory; they count on `barrier`. Addresses and bytes are multiples of 16.
__device__ __forceinline__ void cp_async_bulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint64_t hint) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared), "l"(global),
               "r"(bytes), "r"(barrier), "l"(hint)
               : "memory");
}

}  // namespace dandan::ptx
