// Computes   out[m, n] = round(x[m, k] . w + bias), w of 4-bit codes: fp32 sums of fp16 or bf16 products, one rounding.
// Tile       64 columns of out for each warp group, kTokens rows of x for a block. Of wgmma the 64 rows are weights, dequantised in registers, the
//            columns tokens: a weight is made once for all of them.
// Pipeline   one warp copies, kConsumers warp groups dequantise and multiply; kStages blocks of 64 k, a full and an empty barrier each.
//              copy        b0 b1 b2 b3 ..            codes and scales (contiguous) before the wait on the kernel before, tokens after it
//              dequantise     b0    b1    b2 ..      a warp group in turn; the other has the tensor cores meanwhile
//              multiply          b0    b1    b2 ..
//            split: a part of K for each block of a cluster; they add their fp32 tiles through distributed shared memory, in order of rank.
// Layout     w4a16.h: a thread reads the 32 codes of its two rows and 64 k as 16 bytes. Tokens: rows of 64 k = 128 bytes, swizzled by the copy engine.
// Bound      bytes: n*k/2 codes, 4*n*k/group for scales, m*k*2, m*n*2 over DRAM; FLOPs: 2*m*n*k over the tensor rate (H200: 989 TF).
// Requires   sm_90a; rows of x at multiples of 16 bytes; scales of x's dtype.
// Selected   routes.h.
#pragma once

#include <cuda.h>

#include <dandan/ptx/bulk.cuh>
#include <dandan/ptx/cluster.cuh>
#include <dandan/ptx/mbarrier.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/ptx/setmaxnreg.cuh>
#include <dandan/ptx/tma.cuh>
#include <dandan/ptx/wgmma.cuh>
#include <dandan/ptx/wgmma_registers.cuh>

#include "dequantize.cuh"
#include "w4a16.h"

namespace dandan_w4a16 {

namespace ptx = dandan::ptx;

struct WgmmaParams {
  CUtensorMap x;
  const uint32_t* codes;
  const uint32_t* scales;
  const void* bias;
  void* out;
  int64_t out_stride;
  int m, n;
  int blocks_k;   // of 64 k
  int groups_k;
  int tiles_m;
  bool vector_out;  // rows of out at multiples of 16 bytes
  bool weight_once;
};

template <int kTokens_, int kConsumers_, int kStages_, int kGroup_>
struct WgmmaConfig {
  static constexpr int kTokens = kTokens_, kConsumers = kConsumers_, kStages = kStages_, kGroup = kGroup_;
  // 256 tokens: more than the 168 registers that three warp groups can have each. The copying warp gets a group of its own, which hands its registers on.
  static constexpr bool kMoveRegisters = kTokens > 128;
  static constexpr int kTileN = 64 * kConsumers, kAdders = kConsumers * 128, kThreads = kAdders + (kMoveRegisters ? 128 : 32);
  static_assert(!kMoveRegisters || kConsumers == 2);
  static constexpr int kGroupsOfBlock = kGroup < kBlock ? kBlock / kGroup : 1;
  static constexpr int kTokenBytes = kTokens * 128, kCodeBytes = 2048, kScaleBytes = 256 * kGroupsOfBlock;  // codes and scales: of a warp group
  static constexpr int kStageBytes = kTokenBytes + kConsumers * (kCodeBytes + kScaleBytes);
  static constexpr int kStagePitch = (kStageBytes + 1023) / 1024 * 1024;
  static constexpr int kPipelineBytes = kStages * kStagePitch + 1024 + 16 * kStages;
  static constexpr int kFours = kTokens / 8;  // groups of four accumulators of a thread
  template <int kSplit>
  static constexpr int kShare = (kFours + kSplit - 1) / kSplit;
  template <int kSplit>
  static constexpr int kInboxBytes = (kSplit - 1) * kShare<kSplit> * kAdders * 16;
  static constexpr int kResultStride = kTileN + 8, kResultBytes = kTokens * kResultStride * 2;
  template <int kSplit>
  static constexpr int kAfterBytes = kInboxBytes<kSplit> + kResultBytes + 1024;
  template <int kSplit>
  static constexpr int kSharedBytes = kPipelineBytes > kAfterBytes<kSplit> ? kPipelineBytes : kAfterBytes<kSplit>;
};

template <typename T>
__device__ __forceinline__ float bias_at(const void* bias, int column, int columns) {
  return bias != nullptr && column < columns ? static_cast<float>(static_cast<const T*>(bias)[column]) : 0.f;
}

__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Makes the compiler finish the registers here, before instructions that read them without its knowing when, or keep them until here, behind those.
__device__ __forceinline__ void pin(uint32_t (&fragments)[4][4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(fragments[j][i])::"memory");
  }
}

// Keeps the compiler from working the value out again wherever it is used.
__device__ __forceinline__ uint32_t keep(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The codes and scales of a thread in one stage: where they begin, plus the stage.
template <class C>
struct Packed {
  uint32_t words[4];
  uint2 scales[C::kGroupsOfBlock];
  __device__ __forceinline__ void load(uint32_t codes_at, uint32_t scales_at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(codes_at) : "memory");
#pragma unroll
    for (int q = 0; q < C::kGroupsOfBlock; ++q) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(scales[q].x), "=r"(scales[q].y) : "r"(scales_at + q * 256) : "memory");
    }
  }
};

// A warp group's 64 rows over `count` blocks of 64 k. While the tensor cores have a block, the next one's codes are fetched; they are dequantised when the
// block has ended: ptxas serialises instructions whose registers are written while others run. The other warp groups fill that time.
// kUnroll stages in a row: their addresses are constants beside the first one's.
template <typename T, class C>
__device__ __forceinline__ void multiply(float (&sums)[C::kTokens / 2], uint32_t base, uint32_t full, uint32_t empty, int group, int count) {
  constexpr int kUnroll = C::kStages % 4 == 0 ? 4 : C::kStages;
  static_assert(C::kStages % kUnroll == 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const uint32_t packed_at = base + C::kTokenBytes + group * (C::kCodeBytes + C::kScaleBytes);  // of stage 0
  const uint32_t codes = keep(packed_at + thread * 16), scales = keep(packed_at + C::kCodeBytes + (thread / 32 * 8 + thread % 32 / 4) * 8);
  const uint64_t descriptor = ptx::wgmma_descriptor(base, 16, 1024);
  const uint32_t tokens = keep(static_cast<uint32_t>(descriptor)), full_of = keep(full), empty_of = keep(empty);
  Packed<C> packed;
  uint32_t first = 0, parity = 0;  // stage of the first of kUnroll
  if (count > 0) {
    ptx::mbarrier_wait(full_of, 0);
    packed.load(codes, scales);
  }
  for (int i = 0; i < count; i += kUnroll) {
    const uint32_t at = keep(first * C::kStagePitch), full_at = keep(full_of + 8 * first), empty_at = keep(empty_of + 8 * first), now = parity;
    first += kUnroll;
    if (first == C::kStages) first = 0, parity ^= 1;
    const uint32_t next_at = first * C::kStagePitch, tokens_at = keep(tokens + (at >> 4));
#pragma unroll
    for (int s = 0; s < kUnroll; ++s) {
      if (s > 0 && i + s >= count) break;
      uint32_t a[4][4];
#pragma unroll
      for (int q = 0; q < C::kGroupsOfBlock; ++q) {
        const RowScale<T> upper(packed.scales[q].x), lower(packed.scales[q].y);
        constexpr int kSteps = 4 / C::kGroupsOfBlock;
#pragma unroll
        for (int j = q * kSteps; j < (q + 1) * kSteps; ++j) dequantize<T>(packed.words[j], upper, lower, a[j]);
      }
      pin(a);
      ptx::wgmma_fence_registers(sums);
      ptx::wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Only the lower half of a descriptor changes, and it does not overflow.
        const uint64_t block = (descriptor & 0xFFFFFFFF00000000) | (tokens_at + s * (C::kStagePitch >> 4) + 2 * j);
        ptx::WgmmaRegisters<T, C::kTokens>::run(sums, a[j], block, i + s + j > 0);
      }
      ptx::wgmma_commit_group();
      if (i + s + 1 < count) {
        const bool last = s + 1 == kUnroll;
        const uint32_t to = last ? next_at : at + (s + 1) * C::kStagePitch;
        ptx::mbarrier_wait(last ? full_of + 8 * first : full_at + 8 * (s + 1), last ? parity : now);
        packed.load(codes + to, scales + to);
      }
      ptx::wgmma_wait_group<0>();
      pin(a);
      ptx::wgmma_fence_registers(sums);
      ptx::mbarrier_arrive(empty_at + 8 * s);  // every lane, for what it read of the stage itself
    }
  }
}

template <typename T, class C, int kSplit>
__global__ void __launch_bounds__(C::kThreads) wgmma_kernel(const __grid_constant__ WgmmaParams p) {
  extern __shared__ unsigned char shared[];
  if constexpr (kSplit > 1) ptx::barrier_cluster_arrive_release();  // waited for before the first write to another block: it has begun
  const int rank = kSplit > 1 ? static_cast<int>(ptx::cluster_ctarank()) : 0;
  const int tile = static_cast<int>(blockIdx.x) / kSplit;
  const int m0 = tile % p.tiles_m * C::kTokens, n0 = tile / p.tiles_m * C::kTileN;
  const int first = static_cast<int>(static_cast<int64_t>(p.blocks_k) * rank / kSplit);
  const int count = static_cast<int>(static_cast<int64_t>(p.blocks_k) * (rank + 1) / kSplit) - first;
  const uint32_t start = ptx::shared_address(shared), base = (start + 1023) & ~1023u, full = base + C::kStages * C::kStagePitch, empty = full + 8 * C::kStages;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool copier = threadIdx.x == C::kAdders;

  // Blocks of 64 rows behind the last are not there: their share of a stage is not announced, and what is multiplied from it is not stored.
  const int live = min(C::kConsumers, (p.n + kBlock - 1) / kBlock - n0 / kBlock);
  const uint32_t bytes = C::kTokenBytes + live * (C::kCodeBytes + C::kScaleBytes);
  const auto copy_weights = [&](int i, int stage) {
    const uint32_t to = base + stage * C::kStagePitch + C::kTokenBytes, barrier = full + 8 * stage;
    const uint64_t hint = p.weight_once ? ptx::kEvictFirst : ptx::kEvictNormal;
    for (int c = 0; c < live; ++c) {
      const int64_t row = n0 / kBlock + c, block = first + i;
      ptx::cp_async_bulk(to + c * (C::kCodeBytes + C::kScaleBytes), p.codes + (row * p.blocks_k + block) * (C::kCodeBytes / 4), C::kCodeBytes, barrier, hint);
      ptx::cp_async_bulk(to + c * (C::kCodeBytes + C::kScaleBytes) + C::kCodeBytes, p.scales + (row * p.groups_k + block * kBlock / C::kGroup) * 64,
                         C::kScaleBytes, barrier, hint);
    }
  };
  const auto copy_tokens = [&](int i, int stage) {
    ptx::cp_async_bulk_tensor_2d(base + stage * C::kStagePitch, &p.x, (first + i) * kBlock, m0, full + 8 * stage, ptx::kEvictNormal);
  };
  if (copier) {
    ptx::prefetch_tensormap(&p.x);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(empty + 8 * i, C::kAdders);
    }
    ptx::fence_mbarrier_init();
    const int ahead = min(count, C::kStages);
    for (int i = 0; i < ahead; ++i) {
      ptx::mbarrier_arrive_expect_tx(full + 8 * i, bytes);
      copy_weights(i, i);
    }
    ptx::griddepcontrol_wait();
    for (int i = 0; i < ahead; ++i) copy_tokens(i, i);
  }
  __syncthreads();  // the barriers are set up

  if (warp >= C::kConsumers * 4) {
    if constexpr (C::kMoveRegisters) ptx::setmaxnreg_dec<40>();
    if (copier) {
      int stage = 0;
      uint32_t parity = 0;
      for (int i = C::kStages; i < count; ++i) {
        ptx::mbarrier_wait(empty + 8 * stage, parity);
        ptx::mbarrier_arrive_expect_tx(full + 8 * stage, bytes);
        copy_weights(i, stage);
        copy_tokens(i, stage);
        if (++stage == C::kStages) stage = 0, parity ^= 1;
      }
      ptx::griddepcontrol_launch_dependents();
    }
    __syncwarp();
    if constexpr (kSplit > 1) {  // the barriers of a cluster count every thread
      for (int i = 0; i < 3; ++i) {
        if (i > 0) ptx::barrier_cluster_arrive_release();
        ptx::barrier_cluster_wait_acquire();
      }
    }
    return;
  }

  if constexpr (C::kMoveRegisters) ptx::setmaxnreg_inc<232>();
  float sums[C::kTokens / 2];
  const int group = warp / 4, thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  multiply<T, C>(sums, base, full, empty, group, count);
  if (count == 0) {
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) sums[i] = 0.f;
  }
  constexpr int kShare = C::template kShare<kSplit>;
  if constexpr (kSplit > 1) {
    // Block r gets groups [r * kShare, (r + 1) * kShare) of every thread, from the same thread of each other block.
    ptx::barrier_cluster_wait_acquire();
    ptx::barrier_cluster_arrive_release();  // all stages of all blocks have been read
    ptx::barrier_cluster_wait_acquire();
#pragma unroll
    for (int four = 0; four < C::kFours; ++four) {
      const int owner = four / kShare;
      if (owner == rank) continue;
      const uint32_t slot = rank < owner ? rank : rank - 1;
      const uint32_t to = ptx::mapa(base + ((slot * kShare + four % kShare) * C::kAdders + thread) * 16, owner);
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(sums[4 * four]), "f"(sums[4 * four + 1]), "f"(sums[4 * four + 2]),
                   "f"(sums[4 * four + 3])
                   : "memory");
    }
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
  } else {
    named_barrier(1, C::kAdders);
  }
  ptx::griddepcontrol_wait();
  unsigned char* const stages = shared + (base - start);
  const float4* const inbox = reinterpret_cast<const float4*>(stages);
  T* const result = reinterpret_cast<T*>(stages + C::template kInboxBytes<kSplit>);
  const int row = group * 64 + warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int four = 0; four < C::kFours; ++four) {
    if (four / kShare != rank) continue;
    const float own[4] = {sums[4 * four], sums[4 * four + 1], sums[4 * four + 2], sums[4 * four + 3]};
    float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int r = 0; r < kSplit; ++r) {
      if (r == rank) {
#pragma unroll
        for (int e = 0; e < 4; ++e) total[e] += own[e];
      } else {
        const float4 v = inbox[((r < rank ? r : r - 1) * kShare + four % kShare) * C::kAdders + thread];
        total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
      }
    }
    if (p.bias != nullptr) {
      const float upper = bias_at<T>(p.bias, n0 + row, p.n), lower = bias_at<T>(p.bias, n0 + row + 8, p.n);
      total[0] += upper, total[1] += upper, total[2] += lower, total[3] += lower;
    }
    const int token = four * 8 + column;
    result[token * C::kResultStride + row] = static_cast<T>(total[0]);
    result[(token + 1) * C::kResultStride + row] = static_cast<T>(total[1]);
    result[token * C::kResultStride + row + 8] = static_cast<T>(total[2]);
    result[(token + 1) * C::kResultStride + row + 8] = static_cast<T>(total[3]);
  }
  named_barrier(1, C::kAdders);
  // This block's tokens, eight columns a thread.
  constexpr int kUnitsOfRow = C::kTileN / 8;
  const int until = min(min((rank + 1) * kShare, C::kFours) * 8, p.m - m0) * kUnitsOfRow;
  for (int unit = rank * kShare * 8 * kUnitsOfRow + thread; unit < until; unit += C::kAdders) {
    const int token = unit / kUnitsOfRow, n = n0 + unit % kUnitsOfRow * 8;
    if (n >= p.n) continue;
    const T* const from = result + token * C::kResultStride + unit % kUnitsOfRow * 8;
    T* const to = static_cast<T*>(p.out) + (m0 + token) * p.out_stride + n;
    if (p.vector_out && n + 8 <= p.n) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < 8 && n + e < p.n; ++e) to[e] = from[e];
    }
  }
}

}  // namespace dandan_w4a16
