// Computes   out[m, n] = round(x[m, k] . w + bias), w of 4-bit codes: fp32 sums of fp16 or bf16 products, one rounding; or the sums of each slice
//            of K, which dandan/tile/split_sum.cuh adds.
// Tile       kTokens x kColumns of out a block, kWarpTokens x kWarpColumns a warp; blockIdx.y is the slice of K. Of mma m16n8k16 the 16 rows are
//            weights, the 8 columns tokens: a weight is made once for all tokens of a warp.
// Pipeline   kStages blocks of 64 k in shared memory; every thread copies its chunks of the block that is kStages - 1 ahead:
//              copy       b3 | b4 | b5 | b6 |       (into the stage that block b-1 left); codes and scales before the wait on the kernel before
//              multiply   b0 | b1 | b2 | b3 |       one barrier a block, before its last step, whose operands are then in registers
//              a step: 16 k by kChunk tokens; tokens of the next step are read, and the weights of the next 16 k made, while this one is multiplied
// Layout     stage   | x: a row of 64 k = 128 bytes for each token, swizzled | codes, as in w4a16.h | scales and zero points of the block's groups |
//            afterwards the result, rows of kColumns + 8 elements, to be stored 16 bytes at a time.
// Bound      FLOPs: 2*m*n*k over the rate of mma.sync; bytes: n*k/2 codes, 4*n*k/group for scales, m*k*2, m*n*2.
// Requires   sm_80; rows of x at multiples of 16 bytes, k a multiple of 8; scales of x's dtype.
// Selected   routes.h.
#pragma once

#include <dandan/ptx/cp_async_group.cuh>
#include <dandan/ptx/ldmatrix.cuh>
#include <dandan/ptx/mma.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/tile/split_sum.cuh>
#include <dandan/tile/swizzle.cuh>
#include <dandan/tile/vector.cuh>

#include "configs.h"
#include "dequantize.cuh"
#include "w4a16.h"

namespace dandan_w4a16 {

namespace ptx = dandan::ptx;
namespace tile = dandan::tile;

struct MmaParams {
  const void* x;
  const uint32_t* codes;
  const uint32_t* scales;
  const void* bias;
  void* out;
  float* partials;  // [split][m][n], or nothing: one slice
  int64_t x_stride, out_stride;
  int m, n, k;
  int blocks_k;     // of 64 k
  int groups_k;
  int tiles_m, tiles_n;
  int split;
  int group_shift;  // block of 64 k >> group_shift: its group, where a group has 64 or 128
  bool vector_out;  // rows of out at multiples of 16 bytes
  bool weights_first;
};

// kGroupsOfBlock: groups in 64 k, 2 for groups of 32, else 1.
template <int kTokens_, int kColumns_, int kWarpTokens_, int kWarpColumns_, int kStages_, int kGroupsOfBlock_>
struct MmaConfig {
  static constexpr int kTokens = kTokens_, kColumns = kColumns_, kWarpTokens = kWarpTokens_, kWarpColumns = kWarpColumns_;
  static constexpr int kStages = kStages_, kGroupsOfBlock = kGroupsOfBlock_;
  static constexpr int kWarpsM = kTokens / kWarpTokens, kWarpsN = kColumns / kWarpColumns, kThreads = kWarpsM * kWarpsN * 32;
  static constexpr int kTokenBytes = kTokens * 128, kCodeBytes = kColumns * 32, kScaleBytes = kColumns * 4 * kGroupsOfBlock;
  static constexpr int kStageBytes = kTokenBytes + kCodeBytes + kScaleBytes;
  static constexpr int kResultStride = kColumns + 8;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kRaster = 2048 / kTokens;  // row tiles of a group, see mma_kernel
  static constexpr int kChunk = kWarpTokens < 64 ? kWarpTokens : 64, kChunks = kWarpTokens / kChunk;
  static_assert(kWarpColumns % 16 == 0 && 64 % kWarpColumns == 0 && kColumns % 64 == 0 && kChunk % 16 == 0 && kWarpTokens % kChunk == 0);
  static_assert(kThreads % 128 == 0 && kTokens % (kThreads / 8) == 0 && kColumns * 2 % kThreads == 0 && kScaleBytes / 16 <= kThreads);
  static_assert(kTokens * kResultStride * 2 <= kSharedBytes && kSharedBytes <= kMaxMmaSharedBytes);
};

// A thread's chunks of a stage, 16 bytes each.
template <typename T, class C>
struct MmaCopy {
  static constexpr int kRowStep = C::kThreads / 8, kBlockStep = C::kThreads / 128, kScaleChunks = 16 * C::kGroupsOfBlock;
  const char *x, *codes, *scales;     // of the next block of 64 k, but scales: of the first group
  int64_t x_step, code_step;          // bytes from a chunk to the next
  uint32_t x_to, code_to, scale_to;
  int row, column, block;             // of the first chunk: token, element of 64 k, block of 64 columns
  bool scales_live;

  __device__ __forceinline__ MmaCopy(const MmaParams& p, int64_t m0, int n0, int first) {
    const int thread = static_cast<int>(threadIdx.x);
    row = thread / 8, column = thread % 8 * 8;
    x = static_cast<const char*>(p.x) + ((m0 + row) * p.x_stride + first * int64_t{kBlock} + column) * 2;
    x_step = p.x_stride * (kRowStep * 2);
    x_to = tile::Swizzle<128>::offset(row, column / 8);
    block = thread / 128;
    codes = reinterpret_cast<const char*>(p.codes) + ((n0 / kBlock + block) * int64_t{p.blocks_k} + first) * 2048 + thread % 128 * 16;
    code_step = p.blocks_k * int64_t{2048 * kBlockStep};
    code_to = C::kTokenBytes + thread * 16;
    const int scale_block = n0 / kBlock + thread / kScaleChunks;
    scales = reinterpret_cast<const char*>(p.scales) + scale_block * int64_t{p.groups_k} * 256 + thread % kScaleChunks * 16;
    scale_to = C::kTokenBytes + C::kCodeBytes + thread * 16;
    scales_live = scale_block * kBlock < p.n;
  }

  // What does not exist becomes zeros.
  __device__ __forceinline__ void tokens(uint32_t stage, const MmaParams& p, int rows, int b) {
    const bool there = b * kBlock + column < p.k;
#pragma unroll
    for (int i = 0; i < C::kTokens / kRowStep; ++i) {
      ptx::cp_async_cg_16_zfill(stage + x_to + i * kRowStep * 128, x + i * x_step, there && row + i * kRowStep < rows ? 16 : 0);
    }
    x += 128;
  }

  __device__ __forceinline__ void weights(uint32_t stage, const MmaParams& p, int blocks, int b) {
#pragma unroll
    for (int i = 0; i < C::kColumns * 2 / C::kThreads; ++i) {
      ptx::cp_async_cg_16_zfill(stage + code_to + i * C::kThreads * 16, codes + i * code_step, block + i * kBlockStep < blocks ? 16 : 0);
    }
    codes += 2048;
    if (static_cast<int>(threadIdx.x) < C::kScaleBytes / 16) {
      const int group = C::kGroupsOfBlock == 2 ? 2 * b : b >> p.group_shift;
      ptx::cp_async_cg_16_zfill(stage + scale_to, scales + group * int64_t{256}, scales_live ? 16 : 0);
    }
  }
};

template <typename T, class C>
struct MmaWarp {
  static constexpr int kBlocksN = C::kWarpColumns / 16, kBlocksM = C::kWarpTokens / 8, kChunkBlocks = C::kChunk / 8, kSteps = 4 * C::kChunks;
  float sums[kBlocksN][kBlocksM][4];
  uint32_t a[2][kBlocksN][4];      // weights of 16 k
  uint32_t b[2][kChunkBlocks][2];  // tokens of 16 k
  uint4 codes[kBlocksN];
  uint2 scales[kBlocksN][C::kGroupsOfBlock];
  uint32_t token_offset, code_offset, scale_offset;  // of this lane in a stage

  __device__ __forceinline__ MmaWarp(int warp_m, int warp_n, int lane) {
    const int column = warp_n * C::kWarpColumns;
    token_offset = tile::Swizzle<128>::offset(warp_m * C::kWarpTokens + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    code_offset = C::kTokenBytes + column * 32 + lane * 16;
    scale_offset = C::kTokenBytes + C::kCodeBytes + column / 64 * 256 * C::kGroupsOfBlock + column % 64 * 4 + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < kBlocksN; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksM; ++j) sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0.f;
    }
  }

  __device__ __forceinline__ void load_weights(const unsigned char* stage) {
#pragma unroll
    for (int i = 0; i < kBlocksN; ++i) {
      codes[i] = *reinterpret_cast<const uint4*>(stage + code_offset + i * 512);
#pragma unroll
      for (int q = 0; q < C::kGroupsOfBlock; ++q) scales[i][q] = *reinterpret_cast<const uint2*>(stage + scale_offset + q * 256 + i * 64);
    }
  }

  // Weights of 16 k, number j of the four of a block.
  __device__ __forceinline__ void make_weights(int j) {
#pragma unroll
    for (int i = 0; i < kBlocksN; ++i) {
      const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
      const uint2 pair = scales[i][j * C::kGroupsOfBlock / 4];
      dequantize<T>(words[j], RowScale<T>(pair.x), RowScale<T>(pair.y), a[j % 2][i]);
    }
  }

  // Tokens of a step. Rows keep their key from block to block, so that a step along k is an exclusive or, one across it an addition.
  __device__ __forceinline__ void load_tokens(uint32_t stage, int step) {
    const uint32_t from = ((stage + token_offset) ^ (step / C::kChunks * 32)) + step % C::kChunks * C::kChunk * 128;
#pragma unroll
    for (int j = 0; j < kChunkBlocks; j += 2) {
      uint32_t(&to)[kChunkBlocks][2] = b[step % 2];
      ptx::ldmatrix_x4(to[j][0], to[j][1], to[j + 1][0], to[j + 1][1], from + j * 8 * 128);
    }
  }

  // Row blocks in turn forth and back over the tokens: neighbouring instructions share a fragment.
  __device__ __forceinline__ void multiply(int step) {
#pragma unroll
    for (int i = 0; i < kBlocksN; ++i) {
#pragma unroll
      for (int jj = 0; jj < kChunkBlocks; ++jj) {
        const int j = i % 2 == 0 ? jj : kChunkBlocks - 1 - jj;
        ptx::mma_m16n8k16<T>(sums[i][step % C::kChunks * kChunkBlocks + j], a[step / C::kChunks % 2][i], b[step % 2][j]);
      }
    }
  }
};

template <typename T, class C>
__global__ void __launch_bounds__(C::kThreads) mma_kernel(const __grid_constant__ MmaParams p) {
  constexpr int kAhead = C::kStages - 1;
  using Warp = MmaWarp<T, C>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

  // Tiles in the order of their numbers: groups of kRaster row tiles, in a group the row tile runs first. Blocks that run at a time then share x and
  // the weight in L2.
  const uint32_t of_group = static_cast<uint32_t>(C::kRaster) * static_cast<uint32_t>(p.tiles_n);
  const uint32_t group = blockIdx.x / of_group, rest = blockIdx.x - group * of_group;
  const uint32_t group_rows = min(static_cast<uint32_t>(C::kRaster), static_cast<uint32_t>(p.tiles_m) - group * C::kRaster);
  const int64_t m0 = static_cast<int64_t>(group * C::kRaster + rest % group_rows) * C::kTokens;
  const int n0 = static_cast<int>(rest / group_rows) * C::kColumns;
  const int slice = static_cast<int>(blockIdx.y);
  const int first = static_cast<int>(static_cast<int64_t>(p.blocks_k) * slice / p.split);
  const int end = static_cast<int>(static_cast<int64_t>(p.blocks_k) * (slice + 1) / p.split);
  const int rows = static_cast<int>(min(p.m - m0, static_cast<int64_t>(C::kTokens))), blocks = (p.n - n0 + kBlock - 1) / kBlock;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, warp_n = warp % C::kWarpsN, warp_m = warp / C::kWarpsN;

  MmaCopy<T, C> copy(p, m0, n0, first);
  int next_tokens = first, next_weights = first;  // blocks of 64 k to be copied
  const auto copy_tokens = [&](uint32_t offset) {
    if (next_tokens < end) copy.tokens(stages + offset, p, rows, next_tokens++);
  };
  const auto copy_weights = [&](uint32_t offset) {
    if (next_weights < end) copy.weights(stages + offset, p, blocks, next_weights++);
  };

  // The first blocks. Ahead of a kernel before this one only codes and scales may be read; else a block's operands come together.
  if (p.weights_first) {
#pragma unroll 1
    for (int s = 0; s < kAhead; ++s) copy_weights(s * C::kStageBytes);
  }
  ptx::griddepcontrol_wait();
#pragma unroll 1
  for (int s = 0; s < kAhead; ++s) {
    copy_tokens(s * C::kStageBytes);
    if (next_weights < next_tokens) copy_weights(s * C::kStageBytes);
    ptx::cp_async_commit_group();
  }
  ptx::cp_async_wait_group<kAhead - 1>();
  __syncthreads();

  // Main loop. Every iteration commits one group, an empty one at the end, so that the same count of younger groups may be on its way.
  Warp w(warp_m, warp_n, lane);
  uint32_t reading = 0, writing = kAhead * C::kStageBytes;
  const int last_copies = max(first, end - kAhead);
  w.load_weights(shared);
  w.make_weights(0);
  w.load_tokens(stages, 0);
#pragma unroll 1
  for (int t = first; t < end; ++t) {
    if (t == last_copies) ptx::griddepcontrol_launch_dependents();  // everything is on its way: the next kernel's weights take the memory's time
#pragma unroll
    for (int step = 0; step < Warp::kSteps; ++step) {
      if (step == 1) {
        copy_weights(writing);
        ptx::cp_async_commit_group();
        writing = writing + C::kStageBytes == C::kStages * C::kStageBytes ? 0 : writing + C::kStageBytes;
      }
      if (step == Warp::kSteps - 1) {
        ptx::cp_async_wait_group<kAhead - 1>();
        __syncthreads();  // the next block is whole, and nobody reads the stage of this one any more
        reading = reading + C::kStageBytes == C::kStages * C::kStageBytes ? 0 : reading + C::kStageBytes;
        w.load_weights(shared + reading);
      }
      w.load_tokens(stages + reading, (step + 1) % Warp::kSteps);
      if (step == 0) copy_tokens(writing);
      if ((step + 1) % C::kChunks == 0) w.make_weights((step + 1) / C::kChunks % 4);
      w.multiply(step);
    }
  }

  // Four sums: rows n, n + 8, tokens of the pair 2t, 2t + 1.
  const int pair = warp_m * C::kWarpTokens + lane % 4 * 2, column = warp_n * C::kWarpColumns + lane / 4;
  if (p.partials != nullptr) {
    float* const to = p.partials + (int64_t{p.m} * slice + m0) * p.n + n0;
#pragma unroll
    for (int j = 0; j < Warp::kBlocksM; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = pair + j * 8 + e;
        if (token >= rows) continue;
        float* const row = to + token * int64_t{p.n};
#pragma unroll
        for (int i = 0; i < 2 * Warp::kBlocksN; ++i) {
          if (n0 + column + i * 8 < p.n) row[column + i * 8] = w.sums[i / 2][j][i % 2 * 2 + e];
        }
      }
    }
    return;
  }
  __syncthreads();  // what was read ahead, behind the last block, has been read: the stages become the result
  T* const result = reinterpret_cast<T*>(shared);
#pragma unroll
  for (int i = 0; i < 2 * Warp::kBlocksN; ++i) {
    const int n = column + i * 8;
    const float bias = p.bias != nullptr && n0 + n < p.n ? tile::to_float(static_cast<const T*>(p.bias)[n0 + n]) : 0.f;
#pragma unroll
    for (int j = 0; j < Warp::kBlocksM; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) result[(pair + j * 8 + e) * C::kResultStride + n] = tile::from_float<T>(w.sums[i / 2][j][i % 2 * 2 + e] + bias);
    }
  }
  __syncthreads();
  constexpr int kUnitsOfRow = C::kColumns / 8;
#pragma unroll 1
  for (int unit = thread; unit < rows * kUnitsOfRow; unit += C::kThreads) {
    const int token = unit / kUnitsOfRow, n = unit % kUnitsOfRow * 8, left = p.n - n0 - n;
    if (left <= 0) continue;
    const T* const from = result + token * C::kResultStride + n;
    T* const to = static_cast<T*>(p.out) + (m0 + token) * p.out_stride + n0 + n;
    if (p.vector_out && left >= 8) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < 8 && e < left; ++e) to[e] = from[e];
    }
  }
}

}  // namespace dandan_w4a16
