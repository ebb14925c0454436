// Computes   out[m, n] = round(x[m, k] . w + bias) for m <= 64, w of 4-bit codes: fp32 sums of fp16 or bf16 products, one rounding.
// Tile       all rows of x, kTiles tiles of 16 columns of out for a block; its warps take 128 k in turn. Of mma m16n8k16 the 16 rows are
//            weights, the 8 columns tokens: a weight is made once for all of them.
// Pipeline   each warp has a ring of kDepth stages in shared memory for itself, filled by the copy engine: what is on its way costs no registers.
//              copy         s0 s1 s2 s3 | s4 ..    codes and scales (contiguous) before the wait on the kernel before, x after it
//              dequantize               s0 s1 ..   3.5 instructions for two weights
//              multiply                  s0 s1 ..  then: sums of the warps through shared memory, of a cluster's blocks through distributed one
// Layout     w4a16.h; a token's 64 k are 128 bytes, swizzled by the copy engine. Rows of x that are not there are not copied: what the ring holds in their
//            place ends in columns of the product that nobody stores.
// Bound      bytes: n*k/2 codes and 4*n*k/group for scales over DRAM (H200: 4.8 TB/s).
// Requires   sm_90; rows of x at multiples of 16 bytes; scales of x's dtype.
// Selected   routes.h.
#pragma once

#include <cuda.h>

#include <dandan/ptx/bulk.cuh>
#include <dandan/ptx/elect.cuh>
#include <dandan/ptx/ldmatrix.cuh>
#include <dandan/ptx/mbarrier.cuh>
#include <dandan/ptx/mma.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/ptx/tma.cuh>

#include "configs.h"
#include "decode_sums.cuh"
#include "dequantize.cuh"
#include "w4a16.h"

namespace dandan_w4a16 {

struct RingParams {
  CUtensorMap x;
  const uint32_t* codes;
  const uint32_t* scales;
  const void* bias;
  void* out;
  int64_t out_stride;
  int m, n;
  int blocks_k;  // of 64 k
  int groups_k;
  int split;     // blocks of a cluster, each with its part of K
};

template <int kTiles_, int kHalves_, int kWarps_, int kResident_, int kGroup_>
struct RingConfig {
  static constexpr int kTiles = kTiles_, kHalves = kHalves_, kWarps = kWarps_, kResident = kResident_, kGroup = kGroup_;
  static constexpr int kParts = kTiles > 4 ? kTiles / 4 : 1, kTilesOfPart = kTiles / kParts;  // parts: of different blocks of 64 rows
  static_assert(kTilesOfPart == 1 || kTilesOfPart == 2 || kTilesOfPart == 4);
  // Tokens and codes: of 64 k, codes and scales: of a part, scales: of a group.
  static constexpr int kTokenBytes = kHalves * 1024, kCodeBytes = kTilesOfPart * 512, kScaleBytes = kTilesOfPart * 64;
  static constexpr int groups_of_stage(int blocks) { return blocks * kBlock > kGroup ? blocks * kBlock / kGroup : 1; }
  static constexpr int stage_bytes(int blocks) { return blocks * kTokenBytes + kParts * (blocks * kCodeBytes + groups_of_stage(blocks) * kScaleBytes); }
  static constexpr int kFours = kTiles * kHalves * 32;
  static constexpr int kSumBytes = kFours * 16 * kWarps;
  // As many stages as fit beside kResident - 1 other blocks and what those of a cluster send, 8 at most.
  static constexpr int kRoom = 227 * 1024 / kResident - 2048 - 64 * kWarps - (kMaxRingSplit - 1) * kFours * 16;
  static constexpr int stages(int blocks) { return kRoom / (kWarps * stage_bytes(blocks)) < 8 ? kRoom / (kWarps * stage_bytes(blocks)) : 8; }
  static constexpr int kBlocksOfStage = kHalves == 1 && stages(2) >= 2 ? 2 : 1;  // of 64 k: two share what a stage costs beside the products
  static constexpr int kGroupsOfStage = groups_of_stage(kBlocksOfStage), kGroupsOfBlock = groups_of_stage(1), kDepth = stages(kBlocksOfStage);
  static_assert(kDepth >= 2);
  static constexpr int kStageTokens = kBlocksOfStage * kTokenBytes, kStageCodes = kParts * kBlocksOfStage * kCodeBytes;
  static constexpr int kStageScales = kParts * kGroupsOfStage * kScaleBytes;
  // Tokens, codes, scales and barriers of all warps, from a multiple of 1024 bytes, the period of the swizzle.
  static constexpr int kCodes = kWarps * kDepth * kStageTokens, kScales = kCodes + kWarps * kDepth * kStageCodes;
  static constexpr int kBarriers = kScales + kWarps * kDepth * kStageScales, kRingBytes = kBarriers + kWarps * kDepth * 8 + 1024;
  static constexpr int kOwnBytes = kRingBytes > kSumBytes ? (kRingBytes + 15) / 16 * 16 : kSumBytes;  // the rings, then the sums of the warps
  static constexpr int shared_bytes(int split) { return kOwnBytes + (split - 1) * kFours * 16; }
  static_assert(shared_bytes(kMaxRingSplit) <= 227 * 1024);
};

template <typename T, class C>
__global__ void __launch_bounds__(C::kWarps * 32, C::kResident) ring_kernel(const __grid_constant__ RingParams p) {
  extern __shared__ uint4 shared[];
  const int rank = p.split > 1 ? static_cast<int>(ptx::cluster_ctarank()) : 0;
  if (p.split > 1) ptx::barrier_cluster_arrive_release();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int tile0 = static_cast<int>(blockIdx.x) / p.split * C::kTiles;  // of 16 columns of out
  // A warp takes two blocks of 64 k in a row, then those two of the next round, in one stage or in two: the order of additions is that of the
  // configuration, whatever the number of rows.
  const int step = 2 * C::kWarps * p.split, first = 2 * (rank * C::kWarps + warp);
  const auto block_of = [&](int i) { return C::kBlocksOfStage == 2 ? first + i * step : first + i / 2 * step + i % 2; };
  const uint32_t base = (ptx::shared_address(shared) + 1023) & ~1023u;
  const uint32_t tokens = base + warp * C::kDepth * C::kStageTokens;
  const uint32_t codes = base + C::kCodes + warp * C::kDepth * C::kStageCodes;
  const uint32_t scales = base + C::kScales + warp * C::kDepth * C::kStageScales;
  const uint32_t full = base + C::kBarriers + warp * C::kDepth * 8;

  // Blocks of 64 rows behind the last are not there, nor is the second half of an odd last stage.
  const int parts = C::kParts == 1 ? 1 : min(C::kParts, (p.n + kBlock - 1) / kBlock - tile0 / 4);
  const uint32_t* const codes_of_tile = p.codes + (static_cast<int64_t>(tile0 / 4) * p.blocks_k * 4 + tile0 % 4) * 128;
  const uint32_t* const scales_of_tile = p.scales + (static_cast<int64_t>(tile0 / 4) * p.groups_k * 4 + tile0 % 4) * 16;
  const auto copy_weights = [&](int s, int block) {
    const uint32_t barrier = full + 8 * s;
    const int blocks = min(C::kBlocksOfStage, p.blocks_k - block), group = block * kBlock / C::kGroup, groups = min(C::kGroupsOfStage, p.groups_k - group);
    ptx::mbarrier_arrive_expect_tx(barrier, blocks * p.m * 128 + parts * (blocks * C::kCodeBytes + groups * C::kScaleBytes));
    for (int h = 0; h < parts; ++h) {
      const uint32_t* const codes_at = codes_of_tile + (static_cast<int64_t>(h) * p.blocks_k + block) * 512;
      const uint32_t* const scales_at = scales_of_tile + (static_cast<int64_t>(h) * p.groups_k + group) * 64;
      const uint32_t to_codes = codes + s * C::kStageCodes + h * C::kBlocksOfStage * C::kCodeBytes;
      const uint32_t to_scales = scales + s * C::kStageScales + h * C::kGroupsOfStage * C::kScaleBytes;
      if constexpr (C::kTilesOfPart == 4) {  // contiguous
        ptx::cp_async_bulk(to_codes, codes_at, blocks * C::kCodeBytes, barrier, ptx::kEvictFirst);
        ptx::cp_async_bulk(to_scales, scales_at, groups * C::kScaleBytes, barrier, ptx::kEvictFirst);
      } else {
        for (int q = 0; q < blocks; ++q) ptx::cp_async_bulk(to_codes + q * C::kCodeBytes, codes_at + q * 512, C::kCodeBytes, barrier, ptx::kEvictFirst);
        for (int q = 0; q < groups; ++q) ptx::cp_async_bulk(to_scales + q * C::kScaleBytes, scales_at + q * 64, C::kScaleBytes, barrier, ptx::kEvictFirst);
      }
    }
  };
  const auto copy_tokens = [&](int s, int block) {
#pragma unroll
    for (int q = 0; q < C::kBlocksOfStage; ++q) {
      if (block + q >= p.blocks_k) break;
      ptx::cp_async_bulk_tensor_2d(tokens + s * C::kStageTokens + q * C::kTokenBytes, &p.x, (block + q) * kBlock, 0, full + 8 * s, ptx::kEvictLast);
    }
  };

  ptx::griddepcontrol_launch_dependents();  // at once: the next kernel's loads of its weights take what this one leaves of the memory's time
  if (ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.x);
#pragma unroll
    for (int s = 0; s < C::kDepth; ++s) ptx::mbarrier_init(full + 8 * s, 1);
    ptx::fence_mbarrier_init();
#pragma unroll
    for (int s = 0; s < C::kDepth; ++s) {
      if (block_of(s) < p.blocks_k) copy_weights(s, block_of(s));
    }
  }
  ptx::griddepcontrol_wait();
  if (ptx::elect_sync()) {
#pragma unroll
    for (int s = 0; s < C::kDepth; ++s) {
      if (block_of(s) < p.blocks_k) copy_tokens(s, block_of(s));
    }
  }
  __syncwarp();  // the barriers are set up

  float sums[C::kTiles][C::kHalves][4] = {};
  // Of ldmatrix: matrix j of half h is 8 tokens by k 8j .. 8j + 7.
  const uint32_t row = lane % 8 * 128, chunks[2] = {((lane / 8) ^ (lane % 8)) * 16u, ((4 + lane / 8) ^ (lane % 8)) * 16u};
  const auto multiply = [&](uint32_t tokens_at, uint32_t codes_at, uint32_t scales_at) {
    uint32_t b[C::kHalves][8];
#pragma unroll
    for (int h = 0; h < C::kHalves; ++h) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        ptx::ldmatrix_x4(b[h][4 * q], b[h][4 * q + 1], b[h][4 * q + 2], b[h][4 * q + 3], tokens_at + h * 1024 + row + chunks[q]);
      }
    }
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
      const int part = i / C::kTilesOfPart, tile = i % C::kTilesOfPart;
      uint32_t words[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(codes_at + part * C::kBlocksOfStage * C::kCodeBytes + tile * 512)
                   : "memory");
#pragma unroll
      for (int q = 0; q < C::kGroupsOfBlock; ++q) {
        uint2 pair;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(pair.x), "=r"(pair.y)
                     : "r"(scales_at + (part * C::kGroupsOfStage + q) * C::kScaleBytes + tile * 64)
                     : "memory");
        const RowScale<T> upper(pair.x), lower(pair.y);
#pragma unroll
        for (int j = q * 4 / C::kGroupsOfBlock; j < (q + 1) * 4 / C::kGroupsOfBlock; ++j) {
          uint32_t a[4];
          dequantize<T>(words[j], upper, lower, a);
#pragma unroll
          for (int h = 0; h < C::kHalves; ++h) ptx::mma_m16n8k16<T>(sums[i][h], a, {b[h][2 * j], b[h][2 * j + 1]});
        }
      }
    }
  };
  int stage = 0;
  uint32_t parity = 0;
  int block = first;
  for (int i = 0; block < p.blocks_k; block = block_of(++i)) {
    const uint32_t tokens_at = tokens + stage * C::kStageTokens, codes_at = codes + stage * C::kStageCodes + lane * 16;
    const uint32_t scales_at = scales + stage * C::kStageScales + lane / 4 * 8;
    ptx::mbarrier_wait(full + 8 * stage, parity);
    multiply(tokens_at, codes_at, scales_at);
    if (C::kBlocksOfStage > 1 && block + 1 < p.blocks_k) multiply(tokens_at + C::kTokenBytes, codes_at + C::kCodeBytes, scales_at + kBlock / C::kGroup * C::kScaleBytes);
    __syncwarp();  // every lane has what it read in registers: the multiplications that take it have begun
    const int next = block_of(i + C::kDepth);
    if (next < p.blocks_k && ptx::elect_sync()) {
      copy_weights(stage, next);
      copy_tokens(stage, next);
    }
    if (++stage == C::kDepth) stage = 0, parity ^= 1;
  }
  __syncthreads();  // the rings become the sums
  if (p.split > 1) ptx::barrier_cluster_wait_acquire();  // before the first write to another block's shared memory: that block has begun
  add_and_store<T, C, true>(sums, {p.out, p.out_stride, p.bias, p.m, p.n}, reinterpret_cast<float4*>(shared), tile0 * 16, rank, p.split);
}

}  // namespace dandan_w4a16
