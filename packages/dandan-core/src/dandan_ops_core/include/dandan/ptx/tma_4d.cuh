// Copies of four-dimensional boxes by the tensor memory accelerator (sm_90); hints and barriers as in tma.cuh.
#pragma once

#include <cstdint>

namespace dandan::ptx {

// A box at (x, y, z, w) to shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(uint32_t shared, const void* map, int x, int y, int z, int w, uint32_t barrier, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(hint)
      : "memory");
}

}  // namespace dandan::ptx
