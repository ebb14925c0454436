// Computes   out[m, n] = round(a[m, k] . b + bias) for m <= 16: fp32 sums of fp16 or bf16 products, one rounding.
// Tile       all rows of a, kGroups groups of 8 columns for a block; its warps take slices of 32 * kChunks k in turn. Of mma m16n8k16
//            the 16 rows are tokens, the 8 columns are weight rows.
// Pipeline   weights go from memory to registers and nowhere else; kDepth slices of a warp are in flight.
//              load   s0 s1 s2 s3 | s4 ...          loads before the wait on the kernel before: b alone, where the caller says it is static
//              mma                  s0 s1 s2 ...    then: sums of the warps through shared memory, of a cluster's blocks through distributed one
// Layout     lane 4g + t holds k 8t .. 8t+7 of weight row g, 16 bytes as they lie in memory; a is read alike, so that both sides of the multiplication
//            number k in the same order, which is not the natural one: registers x, y are one step of 16 k, z, w the next.
// Bound      bytes: n*k*2 over DRAM (H200: 4.8 TB/s).
// Requires   sm_80 (K over a cluster's blocks: sm_90); [n, k] weights; rows of a and b at multiples of 16 bytes, k a multiple of 8.
// Selected   routes.h, by cost.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <dandan/ptx/cluster.cuh>
#include <dandan/ptx/global.cuh>
#include <dandan/ptx/mma.cuh>
#include <dandan/ptx/pdl.cuh>

namespace dandan_gemm {

namespace ptx = dandan::ptx;

struct SkinnyParams {
  const void* a;
  const void* b;
  const void* bias;
  void* out;
  int64_t a_stride, b_stride, out_stride;  // in elements
  int m, n, k;
  int split;  // blocks of a cluster, each with its slices of K
  bool static_weight;
};

// 16 bytes that are read once, or zeros. Not the read-only path: its loads were seen above griddepcontrol.wait in the machine code.
__device__ __forceinline__ uint4 load_weight(bool take, const void* address) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(static_cast<uint32_t>(take))
      : "memory");
  return v;
}

// Below sm_90 there are no clusters; kernels that want one are compiled without and never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif

template <int kGroups, int kHalves, int kWarps>
inline constexpr int skinny_shared_bytes(int split) {
  return kGroups * kHalves * 32 * 8 * (kWarps + (split > 1 ? split : 0));
}

// Adds the sums of all warps, then of all blocks, in order, and stores them. A pair is accumulators 2h, 2h + 1 of group i and a lane.
template <typename T, int kGroups, int kHalves, int kWarps, bool kCluster>
__device__ __forceinline__ void add_and_store(const float (&sums)[kGroups][4], const SkinnyParams& p, float2* scratch, int n0, int split, int rank) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  constexpr int kPairs = kGroups * kHalves * 32, kRounds = (kPairs + kWarps * 32 - 1) / (kWarps * 32);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) scratch[warp * kPairs + (i * kHalves + h) * 32 + lane] = make_float2(sums[i][2 * h], sums[i][2 * h + 1]);
  }
  __syncthreads();
  float2 total[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int pair = round * kWarps * 32 + thread;
    total[round] = make_float2(0.f, 0.f);
    if (pair < kPairs) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 v = scratch[w * kPairs + pair];
        total[round].x += v.x, total[round].y += v.y;
      }
    }
  }
  if constexpr (kCluster) {
    // Block 0 adds; what the others send lies behind the sums of its own warps.
    float2* const inbox = scratch + kWarps * kPairs;
    const uint32_t remote = ptx::mapa(static_cast<uint32_t>(__cvta_generic_to_shared(inbox + rank * kPairs)), 0);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int pair = round * kWarps * 32 + thread;
      if (pair < kPairs && rank > 0) {
        ptx::st_shared_cluster(remote + 8 * pair, total[round].x);
        ptx::st_shared_cluster(remote + 8 * pair + 4, total[round].y);
      }
    }
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
    if (rank > 0) return;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int pair = round * kWarps * 32 + thread;
      for (int r = 1; r < split && pair < kPairs; ++r) {
        const float2 v = inbox[r * kPairs + pair];
        total[round].x += v.x, total[round].y += v.y;
      }
    }
  }
  const T* const bias = static_cast<const T*>(p.bias);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int pair = round * kWarps * 32 + thread;
    const int token = pair / 32 % kHalves * 8 + pair % 32 / 4, n = n0 + pair / 32 / kHalves * 8 + pair % 4 * 2;
    if (pair >= kPairs || token >= p.m) continue;
    T* const to = static_cast<T*>(p.out) + token * p.out_stride + n;
    if (n < p.n) to[0] = static_cast<T>(bias != nullptr ? total[round].x + static_cast<float>(bias[n]) : total[round].x);
    if (n + 1 < p.n) to[1] = static_cast<T>(bias != nullptr ? total[round].y + static_cast<float>(bias[n + 1]) : total[round].y);
  }
}

template <typename T, int kGroups, int kHalves, int kChunks, int kWarps, int kDepth, bool kSplit>
__global__ void __launch_bounds__(kWarps * 32) skinny_kernel(const __grid_constant__ SkinnyParams p) {
  constexpr bool kCluster = kSplit && kHasClusters;
  extern __shared__ float2 scratch[];
  const int split = p.split;  // not a constant where it is 1: the compiler then keeps fewer addresses
  int rank = 0;
  if constexpr (kCluster) {
    rank = static_cast<int>(ptx::cluster_ctarank());
    ptx::barrier_cluster_arrive_release();
  }
  const int n0 = static_cast<int>(blockIdx.x) / split * 8 * kGroups;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int step = kWarps * split * 32 * kChunks;
  int k = (rank * kWarps + warp) * 32 * kChunks;  // of this warp's slice: lane t begins at 8t, its next 16 bytes are 32 further
  const T* weights[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) weights[i] = static_cast<const T*>(p.b) + min(n0 + 8 * i + g, p.n - 1) * p.b_stride + 8 * t;
  const T* rows[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) rows[h] = static_cast<const T*>(p.a) + (8 * h + g) * p.a_stride + 8 * t;

  uint4 w[kDepth][kGroups][kChunks], x[kDepth][kHalves][kChunks];
  const auto load_weights = [&](int s, int at) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) w[s][i][c] = load_weight(at + 8 * t + 32 * c < p.k, weights[i] + at + 32 * c);
    }
  };
  const auto load_rows = [&](int s, int at) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        x[s][h][c] = ptx::ld_global_v4_if(8 * h + g < p.m && at + 8 * t + 32 * c < p.k, rows[h] + at + 32 * c, make_uint4(0, 0, 0, 0));
      }
    }
  };
  ptx::griddepcontrol_launch_dependents();  // at once: the next kernel's loads of static weights take what this one leaves of the memory's time
  if (!p.static_weight) ptx::griddepcontrol_wait();
#pragma unroll
  for (int s = 0; s < kDepth; ++s) load_weights(s, k + s * step);
  if (p.static_weight) ptx::griddepcontrol_wait();
#pragma unroll
  for (int s = 0; s < kDepth; ++s) load_rows(s, k + s * step);

  float sums[kGroups][4] = {};
  for (; k < p.k; k += kDepth * step) {
#pragma unroll
    for (int s = 0; s < kDepth; ++s) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4 low = x[s][0][c], high = kHalves == 2 ? x[s][kHalves - 1][c] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          ptx::mma_m16n8k16<T>(sums[i], {low.x, high.x, low.y, high.y}, {w[s][i][c].x, w[s][i][c].y});
          ptx::mma_m16n8k16<T>(sums[i], {low.z, high.z, low.w, high.w}, {w[s][i][c].z, w[s][i][c].w});
        }
      }
      load_weights(s, k + (s + kDepth) * step);
      load_rows(s, k + (s + kDepth) * step);
    }
  }
  if constexpr (kCluster) ptx::barrier_cluster_wait_acquire();  // before the first write to another block's shared memory: that block has begun
  add_and_store<T, kGroups, kHalves, kWarps, kCluster>(sums, p, scratch, n0, split, rank);
}

}  // namespace dandan_gemm
