// The end of the decode kernels: sums of warps and of a cluster's blocks to one result. No float atomics: the order is fixed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <dandan/ptx/cluster.cuh>

namespace dandan_w4a16 {

namespace ptx = dandan::ptx;

// Below sm_90 there are no clusters; kernels that want one are compiled without and never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif

struct Result {
  void* out;
  int64_t out_stride;
  const void* bias;
  int m, n;
};

// Adds the sums of all warps, then of all blocks, in order, and stores them. Four accumulators of tile i, half h, lane 4g + t: n = 16i + g (+ 8),
// token = 8h + 2t (+ 1).
template <typename T, class C, bool kCluster>
__device__ __forceinline__ void add_and_store(const float (&sums)[C::kTiles][C::kHalves][4], const Result& p, float4* scratch, int n0, int rank,
                                              int split) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  constexpr int kRounds = (C::kFours + C::kWarps * 32 - 1) / (C::kWarps * 32);
#pragma unroll
  for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
    for (int h = 0; h < C::kHalves; ++h) {
      scratch[warp * C::kFours + (i * C::kHalves + h) * 32 + lane] = make_float4(sums[i][h][0], sums[i][h][1], sums[i][h][2], sums[i][h][3]);
    }
  }
  __syncthreads();
  float4 total[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int four = round * C::kWarps * 32 + thread;
    total[round] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (four < C::kFours) {
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) {
        const float4 v = scratch[w * C::kFours + four];
        total[round] = make_float4(total[round].x + v.x, total[round].y + v.y, total[round].z + v.z, total[round].w + v.w);
      }
    }
  }
  if (kCluster && split > 1) {
    // Block 0 adds. What the others send has a place of its own: they may be done while block 0 still reads its rings.
    float4* const inbox = scratch + C::kOwnBytes / 16;
    const uint32_t remote = rank > 0 ? ptx::mapa(static_cast<uint32_t>(__cvta_generic_to_shared(inbox + (rank - 1) * C::kFours)), 0) : 0;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int four = round * C::kWarps * 32 + thread;
      if (four < C::kFours && rank > 0) {
        ptx::st_shared_cluster(remote + 16 * four, total[round].x);
        ptx::st_shared_cluster(remote + 16 * four + 4, total[round].y);
        ptx::st_shared_cluster(remote + 16 * four + 8, total[round].z);
        ptx::st_shared_cluster(remote + 16 * four + 12, total[round].w);
      }
    }
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
    if (rank > 0) return;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int four = round * C::kWarps * 32 + thread;
      for (int r = 1; r < split && four < C::kFours; ++r) {
        const float4 v = inbox[(r - 1) * C::kFours + four];
        total[round] = make_float4(total[round].x + v.x, total[round].y + v.y, total[round].z + v.z, total[round].w + v.w);
      }
    }
  }
  const T* const bias = static_cast<const T*>(p.bias);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int four = round * C::kWarps * 32 + thread;
    if (four >= C::kFours) continue;
    const int l = four % 32, n = n0 + four / 32 / C::kHalves * 16 + l / 4, token = four / 32 % C::kHalves * 8 + l % 4 * 2;
    const float v[4] = {total[round].x, total[round].y, total[round].z, total[round].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = n + e / 2 * 8, row = token + e % 2;
      if (column >= p.n || row >= p.m) continue;
      static_cast<T*>(p.out)[row * p.out_stride + column] = static_cast<T>(bias != nullptr ? v[e] + static_cast<float>(bias[column]) : v[e]);
    }
  }
}

}  // namespace dandan_w4a16
