// Thread block clusters (sm_90 and later). The including kernel is compiled for sm_90 and later alone.
#pragma once

#include <cstdint>

namespace dandan::ptx {

// Rank of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Number of blocks in the cluster.
__device__ __forceinline__ uint32_t cluster_nctarank() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

// Shared-memory address, in the cluster window, of `local` (a 32-bit shared address of this block) in block `rank`.
__device__ __forceinline__ uint32_t mapa(uint32_t local, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}

__device__ __forceinline__ void st_shared_cluster(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void st_shared_cluster(uint32_t address, double value) {
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}

__device__ __forceinline__ void st_shared_cluster(uint32_t address, uint64_t value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

// Arrives at the cluster barrier; writes before it are visible after the matching wait.
__device__ __forceinline__ void barrier_cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Waits for every thread of the cluster to have arrived.
__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace dandan::ptx
