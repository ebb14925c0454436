// Computes   out[m, n] = round(a[m, k] . b + bias): fp32 sums of fp16 or bf16 products, one rounding; or the fp32 sums of each slice of K.
// Tile       kTileM x kTileN of the result a block, kWarpM x kWarpN a warp; blockIdx.y is the slice of K.
// Pipeline   kNumStages tiles of K in shared memory; every thread copies its chunks of the tile that is kNumStages - 1 ahead:
//              copy      t3 | t4 | t5 | t6 |       (into the stage that tile t-1 left)
//              multiply  t0 | t1 | t2 | t3 |       one barrier a tile, before the last 16 k of a tile, whose fragments are then in registers
//              fragments  of the next 16 k are loaded while those of this 16 k are multiplied, across tiles too
// Layout     a, and b = [n, k]: rows of kTileK elements, 16-byte chunks exchanged within a row (dandan/tile/swizzle.cuh).
//            b = [k, n]: panels of 64 columns, in each a row of 128 bytes for every k; read transposed.
//              stage   | a: kTileM rows | b: kTileN rows  or  panel 0: kTileK rows | panel 1 .. |
// Bound      FLOPs: 2*m*n*k over the rate of mma.sync (about 0.6 of the tensor rate on sm_90); bytes: (m*k + n*k + m*n) * 2 where m is small.
// Requires   sm_80. Any sizes, strides and addresses: 16-byte copies where rows start at multiples of 16 bytes, else copies of 4 bytes, else single
//            elements; each operand for itself.
// Selected   routes.h: architectures without TMA, operands that are not aligned.
#pragma once

#include <type_traits>

#include <dandan/ptx/cp_async_group.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/ptx/shared.cuh>

#include "mma_tile.cuh"

namespace dandan_gemm {

struct Sm80MmaParams {
  const void *a, *b;
  int64_t a_stride, b_stride;
  MmaOutput output;
  int last_k;             // elements of the last tile of K
  int a_width, b_width;   // bytes of a copy: 16, 4 or 2
  bool static_weight;
};

// A thread's chunks of kRows x kColumns elements: one 16-byte column of every kRowStep-th row. Beyond `rows` and `columns` there are zeros.
template <int kRows, int kColumns, int kThreads>
struct TileCopy {
  static constexpr int kPanel = kColumns < 64 ? kColumns : 64, kRowBytes = kPanel * 2, kChunks = kColumns / 8, kRowStep = kThreads / kChunks;
  static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0, "every pass takes whole rows and keeps the swizzle's key");

  const char* from;
  int64_t step;  // bytes from a row to the one kRowStep further on
  uint32_t to;
  int row, column;

  __device__ __forceinline__ TileCopy(const void* tile_start, int64_t stride, int thread) {
    row = thread / kChunks, column = thread % kChunks * 8;
    from = static_cast<const char*>(tile_start) + (row * stride + column) * 2;
    step = stride * (kRowStep * 2);
    to = static_cast<uint32_t>(column / kPanel * kRows * kRowBytes) + tile::Swizzle<kRowBytes>::offset(row, column % kPanel / 8);
  }

  __device__ __forceinline__ void run(uint32_t shared, int rows, int columns, int width) const {
    const int bytes = max(0, min(8, columns - column)) * 2;
    shared += to;
    if (width == 16) {
#pragma unroll
      for (int i = 0; i < kRows / kRowStep; ++i) {
        ptx::cp_async_cg_16_zfill(shared + i * kRowStep * kRowBytes, from + i * step, row + i * kRowStep < rows ? bytes : 0);
      }
      return;
    }
    const char* at = from;
#pragma unroll 1
    for (int i = 0; i < kRows / kRowStep; ++i, at += step, shared += kRowStep * kRowBytes) {
      const int valid = row + i * kRowStep < rows ? bytes : 0;
      if (width == 4) {
#pragma unroll
        for (int w = 0; w < 4; ++w) ptx::cp_async_ca_4_zfill(shared + 4 * w, at + 4 * w, max(0, min(4, valid - 4 * w)));
      } else {
        const uint16_t* const elements = reinterpret_cast<const uint16_t*>(at);
        uint32_t e[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) e[j] = 2 * j < valid ? elements[j] : 0;
        ptx::st_shared_v4(shared, make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16));
      }
    }
  }
};

template <typename T, class C, bool kWeightTransposed>
__global__ void __launch_bounds__(C::kWarps * 32) sm80_mma_gemm_kernel(const Sm80MmaParams p) {
  constexpr int kThreads = C::kWarps * 32, kAhead = C::kNumStages - 1;
  using Warp = WarpTile<T, C, kWeightTransposed>;
  using CopyA = TileCopy<C::kTileM, C::kTileK, kThreads>;
  using CopyB = std::conditional_t<kWeightTransposed, TileCopy<C::kTileN, C::kTileK, kThreads>, TileCopy<C::kTileK, C::kTileN, kThreads>>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared)), stages_end = stages + C::kNumStages * C::kStageBytes;

  // Set-up.
  const MmaOutput& o = p.output;
  const int slice = static_cast<int>(blockIdx.y), first = slice_begin(o, slice), end = slice_begin(o, slice + 1);
  const TileOrigin origin = origin_of<C>(o, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t first_k = static_cast<int64_t>(first) * C::kTileK;
  const int rows_a = static_cast<int>(min(o.m - origin.m, static_cast<int64_t>(C::kTileM)));
  const int rows_b = static_cast<int>(min(o.n - origin.n, static_cast<int64_t>(C::kTileN)));
  CopyA copy_a(static_cast<const T*>(p.a) + origin.m * p.a_stride + first_k, p.a_stride, thread);
  const int64_t start_b = kWeightTransposed ? origin.n * p.b_stride + first_k : first_k * p.b_stride + origin.n;
  CopyB copy_b(static_cast<const T*>(p.b) + start_b, p.b_stride, thread);
  int next_a = first, next_b = first;  // tiles of K to be copied
  const auto k_of = [&](int tile_k) { return tile_k == o.tiles_k - 1 ? p.last_k : C::kTileK; };
  const auto copy_next_a = [&](uint32_t stage) {
    if (next_a >= end) return;
    copy_a.run(stage, rows_a, k_of(next_a++), p.a_width);
    copy_a.from += C::kTileK * 2;
  };
  const auto copy_next_b = [&](uint32_t stage) {
    if (next_b >= end) return;
    const int k = k_of(next_b++);
    copy_b.run(stage + C::kBytesA, kWeightTransposed ? rows_b : k, kWeightTransposed ? k : rows_b, p.b_width);
    copy_b.from += kWeightTransposed ? C::kTileK * 2 : p.b_stride * (C::kTileK * 2);
  };

  // The first tiles. A weight that nothing before this kernel writes is asked for before those kernels have ended.
  if (p.static_weight) {
#pragma unroll 1
    for (int s = 0; s < kAhead; ++s) copy_next_b(stages + s * C::kStageBytes);
  }
  ptx::griddepcontrol_wait();
#pragma unroll 1
  for (int s = 0; s < kAhead; ++s) {
    copy_next_a(stages + s * C::kStageBytes);
    if (next_b < next_a) copy_next_b(stages + s * C::kStageBytes);
    ptx::cp_async_commit_group();
  }
  ptx::cp_async_wait_group<kAhead - 1>();
  __syncthreads();

  // Main loop. Every iteration commits one group, an empty one at the end, so that the same count of younger groups may be on its way.
  Warp tile(warp, lane);
  typename Warp::Fragments fragments[2];
  tile.clear();
  uint32_t reading = stages, writing = stages + kAhead * C::kStageBytes;
  tile.load(fragments[0], reading, 0);
#pragma unroll 1
  for (int t = first; t < end; ++t) {
#pragma unroll
    for (int step = 0; step < Warp::kSteps; ++step) {
      if (step == 1) {
        copy_next_b(writing);
        ptx::cp_async_commit_group();
        writing = writing + C::kStageBytes == stages_end ? stages : writing + C::kStageBytes;
      }
      if (step == Warp::kSteps - 1) {
        ptx::cp_async_wait_group<kAhead - 1>();
        __syncthreads();  // the next tile is whole, and nobody reads the stage of this one any more
        reading = reading + C::kStageBytes == stages_end ? stages : reading + C::kStageBytes;
      }
      tile.load(fragments[(step + 1) % 2], reading, (step + 1) % Warp::kSteps);
      if (step == 0) copy_next_a(writing);
      tile.multiply(fragments[step % 2]);
    }
  }
  ptx::griddepcontrol_launch_dependents();

  // Epilogue, from registers.
  tile.store(o, origin, slice, warp, lane);
}

}  // namespace dandan_gemm
