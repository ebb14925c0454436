// Tensor copies by the tensor memory accelerator (sm_90). `map` is a CUtensorMap in kernel parameter space, x the coordinate along the contiguous
// dimension. Written by hand because CCCL's functions take no cache hint.
#pragma once

#include <cstdint>

namespace dandan::ptx {

inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;
inline constexpr uint64_t kEvictNormal = 0x1000000000000000;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// A box at (x, y) to shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(uint32_t shared, const void* map, int x, int y, uint32_t barrier, uint64_t hint) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
               "l"(reinterpret_cast<uint64_t>(map)), "r"(x), "r"(y), "r"(barrier), "l"(hint)
               : "memory");
}

// The same to every block of the cluster whose bit is set, at the same offset, counting on each block's own barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_multicast(uint32_t shared, const void* map, int x, int y, uint32_t barrier, uint16_t blocks,
                                                                  uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, "
      "%6;" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(x), "r"(y), "r"(barrier), "h"(blocks), "l"(hint)
      : "memory");
}

// A box from shared memory to (x, y).
__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(const void* map, int x, int y, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(reinterpret_cast<uint64_t>(map)), "r"(x), "r"(y),
               "r"(shared)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kGroups of this thread's stores still read shared memory.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// Waits until at most kGroups of this thread's stores are not yet written.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Orders this thread's ordinary writes to shared memory before reads by the copy engine and the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace dandan::ptx
