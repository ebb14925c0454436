// Computes   out[m, n] = round(x[m, k] . w + bias) for m <= 16, w of 4-bit codes: fp32 sums of fp16 or bf16 products, one rounding.
// Tile       all rows of x, kTiles tiles of 16 columns of out for a block; its warps take blocks of 64 k in turn. Of mma m16n8k16 the 16 rows are
//            weights, the 8 columns tokens.
// Pipeline   codes and scales go from memory to registers, x to a ring in shared memory that a warp has for itself; kDepth blocks of 64 k in flight:
//              load         b0 b1 b2 | b3 ...      codes and scales before the wait on the kernel before, x after it
//              dequantize            b0 b1 ..      3.5 instructions for two weights
//              multiply               b0 b1 ..     then: sums of the warps through shared memory, of a cluster's blocks through distributed one
// Layout     w4a16.h; a token's 64 k are 128 bytes of the ring, 16-byte chunk c of token r at place c ^ (r % 8), for ldmatrix.
// Bound      bytes: n*k/2 codes and 4*n*k/group for scales over DRAM (H200: 4.8 TB/s).
// Requires   sm_80 (K over a cluster's blocks: sm_90); rows of x at multiples of 16 bytes, k a multiple of 8; scales of x's dtype.
// Selected   routes.h.
#pragma once

#include <dandan/ptx/cp_async_group.cuh>
#include <dandan/ptx/ldmatrix.cuh>
#include <dandan/ptx/mma.cuh>
#include <dandan/ptx/pdl.cuh>

#include "decode_sums.cuh"
#include "dequantize.cuh"
#include "w4a16.h"

namespace dandan_w4a16 {

struct DecodeParams {
  const void* x;
  const uint32_t* codes;
  const uint32_t* scales;
  const void* bias;
  void* out;
  int64_t x_stride, out_stride;
  int m, n, k;
  int blocks_k;  // of 64 k
  int split;     // blocks of a cluster, each with its part of K
};

// 16 bytes that are read once, or zeros.
__device__ __forceinline__ uint4 load_codes(bool take, const void* address) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(static_cast<uint32_t>(take))
      : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_scales(bool take, const void* address) {
  uint2 v = make_uint2(0, 0);
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t@p ld.global.v2.u32 {%0, %1}, [%2];\n\t}"
               : "+r"(v.x), "+r"(v.y)
               : "l"(address), "r"(static_cast<uint32_t>(take))
               : "memory");
  return v;
}

template <int kTiles_, int kHalves_, int kWarps_, int kDepth_, int kGroup_>
struct DecodeConfig {
  static constexpr int kTiles = kTiles_, kHalves = kHalves_, kWarps = kWarps_, kDepth = kDepth_, kGroup = kGroup_;
  static constexpr int kGroupsOfBlock = kGroup < kBlock ? kBlock / kGroup : 1;
  static_assert(4 % kTiles == 0);  // the tiles of a block of threads are of one block of 64 rows: contiguous, and there where the first is
  static constexpr int kRingBytes = 8 * kHalves * 128;                    // of a block of 64 k
  static constexpr int kRings = kWarps * kDepth * kRingBytes;
  static constexpr int kFours = kTiles * kHalves * 32;                    // accumulators of a warp, four each
  // Blocks that shall fit a multiprocessor by registers; 0: the compiler chooses. With two groups a block and four tiles it aims too high, and spills.
  static constexpr int kBlocks = kGroup < kBlock && kTiles == 4 ? 8 / kWarps : 0;
  static constexpr int kOwnBytes = kRings > kFours * 16 * kWarps ? kRings : kFours * 16 * kWarps;  // the rings, then the sums of the warps
  static constexpr int shared_bytes(int split) { return kOwnBytes + (split - 1) * kFours * 16; }
};

template <typename T, class C, bool kSplit>
__global__ void __launch_bounds__(C::kWarps * 32, C::kBlocks) decode_kernel(const __grid_constant__ DecodeParams p) {
  constexpr bool kCluster = kSplit && kHasClusters;
  extern __shared__ uint4 shared[];
  int rank = 0;
  if constexpr (kCluster) {
    rank = static_cast<int>(ptx::cluster_ctarank());
    ptx::barrier_cluster_arrive_release();
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int tile0 = static_cast<int>(blockIdx.x) / p.split * C::kTiles;  // of 16 columns of out
  const int step = C::kWarps * p.split;
  int block = rank * C::kWarps + warp;  // of 64 k
  const int groups_k = (p.blocks_k * kBlock + C::kGroup - 1) / C::kGroup;
  const uint32_t* const codes_of_lane = p.codes + (static_cast<int64_t>(tile0 / 4) * p.blocks_k * 4 + tile0 % 4) * 128 + lane * 4;
  const uint32_t* const scales_of_lane = p.scales + (static_cast<int64_t>(tile0 / 4) * groups_k * 4 + tile0 % 4) * 16 + lane / 4 * 2;
  const T* const x_of_lane = static_cast<const T*>(p.x) + (lane / 8) * p.x_stride + lane % 8 * 8;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * C::kDepth * C::kRingBytes;

  uint4 codes[C::kDepth][C::kTiles];
  uint2 scales[C::kDepth][C::kTiles][C::kGroupsOfBlock];
  const auto load_weights = [&](int s, int b) {
    const bool live = b < p.blocks_k;
    const uint32_t* const codes_at = codes_of_lane + static_cast<int64_t>(b) * 512;
    const uint32_t* const scales_at = scales_of_lane + static_cast<int64_t>(b * kBlock / C::kGroup) * 64;
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
      codes[s][i] = load_codes(live, codes_at + i * 128);
#pragma unroll
      for (int q = 0; q < C::kGroupsOfBlock; ++q) scales[s][i][q] = load_scales(live, scales_at + q * 64 + i * 16);
    }
  };
  // 8 * kHalves tokens of 64 k by 16-byte chunks; what does not exist is zero.
  const auto load_rows = [&](int s, int b) {
#pragma unroll
    for (int i = 0; i < 2 * C::kHalves; ++i) {
      const int token = i * 4 + lane / 8, chunk = lane % 8, k = b * kBlock + chunk * 8;
      const bool live = token < p.m && k < p.k;
      const T* const from = live ? x_of_lane + i * 4 * p.x_stride + b * kBlock : static_cast<const T*>(p.x);
      ptx::cp_async_cg_16_zfill(ring + s * C::kRingBytes + token * 128 + ((chunk ^ (token % 8)) * 16), from, live ? 16 : 0);
    }
    ptx::cp_async_commit_group();
  };
  ptx::griddepcontrol_launch_dependents();  // at once: the next kernel's loads of its weights take what this one leaves of the memory's time
#pragma unroll
  for (int s = 0; s < C::kDepth; ++s) load_weights(s, block + s * step);
  ptx::griddepcontrol_wait();
#pragma unroll
  for (int s = 0; s < C::kDepth; ++s) load_rows(s, block + s * step);

  float sums[C::kTiles][C::kHalves][4] = {};
  for (; block < p.blocks_k; block += C::kDepth * step) {
#pragma unroll
    for (int s = 0; s < C::kDepth; ++s) {
      ptx::cp_async_wait_group<C::kDepth - 1>();
      __syncwarp();
      // Tokens of the block: matrix j of half h is 8 tokens by k 8j .. 8j + 7.
      uint32_t b[C::kHalves][8];
#pragma unroll
      for (int h = 0; h < C::kHalves; ++h) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const int token = 8 * h + lane % 8, chunk = 4 * q + lane / 8;
          ptx::ldmatrix_x4(b[h][4 * q], b[h][4 * q + 1], b[h][4 * q + 2], b[h][4 * q + 3],
                           ring + s * C::kRingBytes + token * 128 + ((chunk ^ (token % 8)) * 16));
        }
      }
#pragma unroll
      for (int i = 0; i < C::kTiles; ++i) {
        const uint32_t words[4] = {codes[s][i].x, codes[s][i].y, codes[s][i].z, codes[s][i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint2 pair = scales[s][i][j * 16 * C::kGroupsOfBlock / kBlock];
          uint32_t a[4];
          dequantize<T>(words[j], RowScale<T>(pair.x), RowScale<T>(pair.y), a);
#pragma unroll
          for (int h = 0; h < C::kHalves; ++h) ptx::mma_m16n8k16<T>(sums[i][h], a, {b[h][2 * j], b[h][2 * j + 1]});
        }
      }
      __syncwarp();  // every lane has read the ring before it is written again
      load_weights(s, block + (s + C::kDepth) * step);
      load_rows(s, block + (s + C::kDepth) * step);
    }
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // the rings become the sums
  if constexpr (kCluster) ptx::barrier_cluster_wait_acquire();  // before the first write to another block's shared memory: that block has begun
  add_and_store<T, C, kCluster>(sums, {p.out, p.out_stride, p.bias, p.m, p.n}, reinterpret_cast<float4*>(shared), tile0 * 16, rank, p.split);
}

}  // namespace dandan_w4a16
