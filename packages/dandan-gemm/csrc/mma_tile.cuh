// Shared by the kernels that multiply by mma.sync: which tile a block has, a warp's part of it, and how its sums leave.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <dandan/ptx/global.cuh>
#include <dandan/ptx/ldmatrix.cuh>
#include <dandan/ptx/mma.cuh>
#include <dandan/tile/swizzle.cuh>
#include <dandan/tile/vector.cuh>

#include "gemm.h"

namespace dandan_gemm {

namespace ptx = dandan::ptx;
namespace tile = dandan::tile;

template <int kTileM_, int kTileN_, int kTileK_, int kWarpM_, int kWarpN_, int kStages_>
struct MmaConfig {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileK_, kWarpM = kWarpM_, kWarpN = kWarpN_, kNumStages = kStages_;
  static constexpr int kWarpsM = kTileM / kWarpM, kWarpsN = kTileN / kWarpN, kWarps = kWarpsM * kWarpsN;
  static constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2, kStageBytes = kBytesA + kBytesB;
  static constexpr int kRaster = 2048 / kTileM;  // row tiles of a group, see origin_of()
  static_assert(kTileK == 32 || kTileK == 64, "a row of K is 64 or 128 bytes: the width of a swizzle");
  static_assert(kTileN % 64 == 0, "columns of a [k, n] weight come in panels of 64");
  static_assert(kWarpM % 16 == 0 && (kWarpN == 32 || kWarpN == 64) && kTileM % kWarpM == 0 && kTileN % kWarpN == 0);
};

// The result and its tiles.
struct MmaOutput {
  const void* bias;
  void* out;
  float* partials;  // [split][m][n], or nothing: one slice
  int64_t out_stride, m, n;
  int tiles_m, tiles_n;
  int tiles_k, split;
  bool vector_out;  // rows of out start at multiples of 16 bytes
};

template <class C>
inline MmaOutput mma_output(const Params& params, const Launch& launch) {
  MmaOutput o;
  o.bias = params.bias;
  o.out = params.out;
  o.split = launch.tile.split;
  o.partials = o.split > 1 ? static_cast<float*>(launch.workspace) : nullptr;
  o.out_stride = params.out_stride, o.m = params.m, o.n = params.n;
  o.tiles_m = static_cast<int>((params.m + C::kTileM - 1) / C::kTileM);
  o.tiles_n = static_cast<int>((params.n + C::kTileN - 1) / C::kTileN);
  o.tiles_k = static_cast<int>((params.k + C::kTileK - 1) / C::kTileK);
  o.vector_out = reinterpret_cast<uintptr_t>(params.out) % 16 == 0 && (params.out_stride % 8 == 0 || params.m == 1);
  return o;
}

struct TileOrigin {
  int64_t m, n;
};

// Tiles in the order of their numbers: groups of kRaster row tiles, in a group the row tile runs first. Blocks that run at a time then read about as
// many rows of a as columns of b, and find them in L2.
template <class C>
__device__ __forceinline__ TileOrigin origin_of(const MmaOutput& o, uint32_t number) {
  const uint32_t of_group = static_cast<uint32_t>(C::kRaster) * static_cast<uint32_t>(o.tiles_n);
  const uint32_t group = number / of_group, rest = number - group * of_group;
  const uint32_t rows = min(static_cast<uint32_t>(C::kRaster), static_cast<uint32_t>(o.tiles_m) - group * C::kRaster);
  const uint32_t column = rest / rows;
  return {static_cast<int64_t>(group * C::kRaster + (rest - column * rows)) * C::kTileM, static_cast<int64_t>(column) * C::kTileN};
}

// First tile of K of a slice; of slice `split`: their number.
__device__ __forceinline__ int slice_begin(const MmaOutput& o, int slice) {
  return static_cast<int>(static_cast<int64_t>(o.tiles_k) * slice / o.split);
}

// Transposes 4x4 words over the four lanes of a quad: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  uint32_t give0 = odd ? w[0] : w[1], give1 = odd ? w[2] : w[3];
  give0 = __shfl_xor_sync(0xffffffffu, give0, 1), give1 = __shfl_xor_sync(0xffffffffu, give1, 1);
  if (odd) w[0] = give0, w[2] = give1;
  else w[1] = give0, w[3] = give1;
  give0 = upper ? w[0] : w[2], give1 = upper ? w[1] : w[3];
  give0 = __shfl_xor_sync(0xffffffffu, give0, 2), give1 = __shfl_xor_sync(0xffffffffu, give1, 2);
  if (upper) w[0] = give0, w[1] = give1;
  else w[2] = give0, w[3] = give1;
}

template <typename T>
__device__ __forceinline__ float bias_at(const void* bias, bool live, int64_t column) {
  return live ? tile::to_float(static_cast<const T*>(bias)[column]) : 0.f;
}

// kWarpM x kWarpN of a tile. In a stage, a's rows of K come first, then b's: rows of K, or, [k, n] weights, panels of 64 columns, in each a row of
// 128 bytes for every k.
template <typename T, class C, bool kWeightTransposed>
struct WarpTile {
  static constexpr int kBlocksM = C::kWarpM / 16, kBlocksN = C::kWarpN / 8, kSteps = C::kTileK / 16;
  static constexpr int kRowBytes = C::kTileK * 2, kPanelBytes = C::kTileK * 128;
  using KSwizzle = tile::Swizzle<kRowBytes>;
  using NSwizzle = tile::Swizzle<128>;

  struct Fragments {
    uint32_t a[kBlocksM][4], b[kBlocksN][2];
  };

  float sums[kBlocksM][kBlocksN][4];
  uint32_t offset_a, offset_b;  // of this lane's ldmatrix row in a stage

  __device__ __forceinline__ WarpTile(int warp, int lane) {
    const int row_a = warp / C::kWarpsN * C::kWarpM, row_b = warp % C::kWarpsN * C::kWarpN;
    offset_a = KSwizzle::offset(row_a + lane % 16, lane / 16);
    if constexpr (kWeightTransposed) {
      offset_b = C::kBytesA + KSwizzle::offset(row_b + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    } else {
      offset_b = C::kBytesA + row_b / 64 * kPanelBytes + NSwizzle::offset(lane % 16, row_b % 64 / 8 + lane / 16);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0.f;
    }
  }

  // Fragments of 16 k. Stages start at multiples of 128 bytes and a lane's row keeps its key from block to block, so a step along the swizzled
  // direction (two chunks) is an exclusive or, one across it an addition.
  __device__ __forceinline__ void load(Fragments& f, uint32_t stage, int step) const {
    const uint32_t a = (stage + offset_a) ^ (step * 32);
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) ptx::ldmatrix_x4(f.a[i][0], f.a[i][1], f.a[i][2], f.a[i][3], a + i * 16 * kRowBytes);
#pragma unroll
    for (int j = 0; j < kBlocksN; j += 2) {
      if constexpr (kWeightTransposed) {
        ptx::ldmatrix_x4(f.b[j][0], f.b[j][1], f.b[j + 1][0], f.b[j + 1][1], ((stage + offset_b) ^ (step * 32)) + j * 8 * kRowBytes);
      } else {
        ptx::ldmatrix_x4_trans(f.b[j][0], f.b[j][1], f.b[j + 1][0], f.b[j + 1][1], ((stage + offset_b) ^ (j * 16)) + step * 16 * 128);
      }
    }
  }

  // Row blocks in turn forth and back over the columns: neighbouring instructions share a fragment.
  __device__ __forceinline__ void multiply(const Fragments& f) {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int jj = 0; jj < kBlocksN; ++jj) {
        const int j = i % 2 == 0 ? jj : kBlocksN - 1 - jj;
        ptx::mma_m16n8k16<T>(sums[i][j], f.a[i], f.b[j]);
      }
    }
  }

  // Stores the sums of the tile at `origin`. A quad holds, of a row, eight columns of each block j; transposed over four blocks every lane has eight
  // columns of one, 16 bytes. All lanes of a warp call it together.
  __device__ __forceinline__ void store(const MmaOutput& o, const TileOrigin& origin, int slice, int warp, int lane) const {
    const int64_t m0 = origin.m + warp / C::kWarpsN * C::kWarpM, n0 = origin.n + warp % C::kWarpsN * C::kWarpN;
    const int rows = static_cast<int>(min(o.m - m0, static_cast<int64_t>(C::kWarpM)));
    const int columns = static_cast<int>(min(o.n - n0, static_cast<int64_t>(C::kWarpN)));
    if (rows <= 0 || columns <= 0) return;
    if (o.partials != nullptr) return store_partials(o.partials + (slice * o.m + m0) * o.n + n0, o.n, rows, columns, lane);
    T* const to = static_cast<T*>(o.out) + (m0 + lane / 4) * o.out_stride + n0 + lane % 4 * 8;
#pragma unroll
    for (int group = 0; group < kBlocksN / 4; ++group) {
      float bias[4][2];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int column = (group * 4 + b) * 8 + lane % 4 * 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) bias[b][e] = bias_at<T>(o.bias, o.bias != nullptr && column + e < columns, n0 + column + e);
      }
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t w[4];
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const float* d = sums[i][group * 4 + b] + 2 * half;
            w[b] = tile::pack_pair(d[0] + bias[b][0], d[1] + bias[b][1], T{});
          }
          transpose_quad(w);
          const int left = columns - group * 32 - lane % 4 * 8;
          const int row = i * 16 + half * 8;
          if (row + lane / 4 < rows && left > 0) store_chunk(to + row * o.out_stride + group * 32, w, o.vector_out, left);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void store_chunk(T* to, const uint32_t (&w)[4], bool vector_out, int left) {
    if (vector_out && left >= 8) {
      ptx::st_global_v4(to, make_uint4(w[0], w[1], w[2], w[3]));
      return;
    }
    uint16_t* const elements = reinterpret_cast<uint16_t*>(to);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e < left) elements[e] = static_cast<uint16_t>(w[e / 2] >> (e % 2 * 16));
    }
  }

  // `to` is the warp tile's first element; rows are `n` apart.
  __device__ __forceinline__ void store_partials(float* to, int64_t n, int rows, int columns, int lane) const {
    to += lane / 4 * n + lane % 4 * 2;
    const bool pairs = n % 2 == 0;
    const int left = columns - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * 16 + half * 8;
        if (row + lane / 4 >= rows) continue;
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          float* const at = to + row * n + j * 8;
          const float* d = sums[i][j] + 2 * half;
          if (pairs) {
            if (j * 8 < left) *reinterpret_cast<float2*>(at) = make_float2(d[0], d[1]);
          } else {
            if (j * 8 < left) at[0] = d[0];
            if (j * 8 + 1 < left) at[1] = d[1];
          }
        }
      }
    }
  }
};

}  // namespace dandan_gemm
