// Sums and maxima over the blocks of a cluster, after row_reduce (sm_90 and later).
#pragma once

#include <cstdint>

#include <dandan/ptx/cluster.cuh>

namespace dandan::tile {

inline constexpr int kMaxCluster = 16;

template <typename V, int kValues>
struct ClusterScratch {
  V values[kValues][kMaxCluster];
};

// Writes this block's value into every block's slot. The barrier that follows also keeps each block alive until it has been written.
template <typename V>
__device__ __forceinline__ void cluster_scatter(V value, V* slots) {
  if (threadIdx.x < ptx::cluster_nctarank()) {
    const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(slots + ptx::cluster_ctarank()));
    ptx::st_shared_cluster(ptx::mapa(local, threadIdx.x), value);
  }
}

// Every thread of a block holds the block's value and gets the cluster's; blocks in turn. A scratch serves once in a kernel.
template <typename Op, typename V, int kValues>
__device__ __forceinline__ void cluster_reduce(V (&v)[kValues], ClusterScratch<V, kValues>& scratch) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) cluster_scatter(v[i], scratch.values[i]);
  ptx::barrier_cluster_arrive_release();
  ptx::barrier_cluster_wait_acquire();
  const int blocks = static_cast<int>(ptx::cluster_nctarank());
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    v[i] = scratch.values[i][0];
    for (int b = 1; b < blocks; ++b) v[i] = Op::apply(v[i], scratch.values[i][b]);
  }
}

__device__ __forceinline__ uint64_t cluster_reduce_max(uint64_t key, uint64_t* slots) {
  cluster_scatter(key, slots);
  ptx::barrier_cluster_arrive_release();
  ptx::barrier_cluster_wait_acquire();
  const int blocks = static_cast<int>(ptx::cluster_nctarank());
  for (int b = 0; b < blocks; ++b) key = slots[b] > key ? slots[b] : key;
  return key;
}

}  // namespace dandan::tile
