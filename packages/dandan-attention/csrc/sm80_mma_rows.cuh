// What a warp of sm80_mma does with its rows of q: logits, mask, online softmax, P v, and how the result leaves.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include <dandan/ptx/global.cuh>
#include <dandan/ptx/ldmatrix.cuh>
#include <dandan/ptx/math.cuh>
#include <dandan/ptx/mma.cuh>
#include <dandan/ptx/tid.cuh>
#include <dandan/tile/quad.cuh>
#include <dandan/tile/quad_reduce.cuh>
#include <dandan/tile/swizzle.cuh>
#include <dandan/tile/vector.cuh>

#include "configs.h"
#include "mask.cuh"

namespace dandan_attention {

namespace ptx = dandan::ptx;
namespace tile = dandan::tile;

template <int kHeadDim_, int kTileM_, int kTileN_, int kWarps_, int kSlots_, bool kQInRegisters_, int kBlocks_>
struct MmaConfig {
  static constexpr int kHeadDim = kHeadDim_, kTileM = kTileM_, kTileN = kTileN_, kWarps = kWarps_, kSlots = kSlots_;
  static constexpr int kBlocks = kBlocks_;  // of a multiprocessor at a time, as far as registers go
  static constexpr bool kQInRegisters = kQInRegisters_, kPaired = kSlots == 4;
  static constexpr int kThreads = kWarps * 32, kWarpM = kTileM / kWarps, kPanels = kHeadDim / 64;
  static constexpr int kBytesQ = kTileM * kHeadDim * 2, kSlotBytes = kTileN * kHeadDim * 2;
  static constexpr int kPlansAt = kBytesQ + kSlots * kSlotBytes, kSharedBytes = kPlansAt + kWarps * kPlanBytes;
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256);
  static_assert(kWarpM == 16 || kWarpM == 32);
  static_assert(kTileN % 16 == 0 && kSlots >= 2 && kSlots <= 4);
};

// What becomes of q . k before the mask.
enum class MmaTransform : int { kNone = 0, kSoftcap = 1, kScale = 2 };

// The rows of a warp: S, P and the result, lanes as in dandan/ptx/mma.cuh.
template <typename T, class C>
struct WarpRows {
  static constexpr int kBlocksM = C::kWarpM / 16, kBlocksN = C::kTileN / 8, kBlocksD = C::kHeadDim / 8, kStepsD = C::kHeadDim / 16;
  static constexpr int kStepsN = C::kTileN / 16;

  float out[kBlocksM][kBlocksD][4], s[kBlocksM][kBlocksN][4];
  float reference[kBlocksM][2], sum[kBlocksM][2];  // reference: times exponent, -inf before the first key; sum: of this lane's columns alone
  uint32_t q[C::kQInRegisters ? kStepsD : 2][kBlocksM][4];
  uint32_t q_start;  // the warp's first row in shared memory

  __device__ __forceinline__ WarpRows(uint32_t shared_q, int warp) {
    q_start = shared_q + warp * C::kWarpM * 128;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      reference[i][0] = reference[i][1] = -INFINITY;
      sum[i][0] = sum[i][1] = 0.f;
#pragma unroll
      for (int j = 0; j < kBlocksD; ++j) out[i][j][0] = out[i][j][1] = out[i][j][2] = out[i][j][3] = 0.f;
    }
  }

  // Offsets of this lane's ldmatrix row: the matrices of 16 x 16 elements down the rows first, or along them first. Tiles start at multiples of 1024
  // bytes and a lane's row keeps its key from block to block: a step along the swizzled direction (two chunks of a panel) is an exclusive or, everything
  // else an addition.
  static __device__ __forceinline__ uint32_t rows_first() {
    const int lane = ptx::tid_x() % 32;
    return tile::Swizzle<128>::offset(lane % 16, lane / 16);
  }
  static __device__ __forceinline__ uint32_t columns_first() {
    const int lane = ptx::tid_x() % 32;
    return tile::Swizzle<128>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  __device__ __forceinline__ void load_q(uint32_t (&f)[kBlocksM][4], uint32_t q_row, int step) const {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      ptx::ldmatrix_x4(f[i][0], f[i][1], f[i][2], f[i][3], (q_row ^ (step % 4 * 32)) + (step / 4 * C::kTileM + i * 16) * 128);
    }
  }
  __device__ __forceinline__ void load_all_q() {
    if constexpr (C::kQInRegisters) {
      const uint32_t q_row = q_start + rows_first();
#pragma unroll
      for (int step = 0; step < kStepsD; ++step) load_q(q[step], q_row, step);
    }
  }

  // s = q . k, of 16 columns after another; 16 keys at a time, whose fragments are loaded two times ahead.
  __device__ __forceinline__ void multiply_qk(uint32_t slot) {
    constexpr int kTotal = kStepsD * kStepsN, kAhead = 2;
    const uint32_t k_row = slot + columns_first(), q_row = C::kQInRegisters ? 0 : q_start + rows_first();
    uint32_t k[kAhead + 1][2][2];
    const auto load_k = [&](int u) {
      const int step = u / kStepsN, j = u % kStepsN;
      uint32_t(&f)[2][2] = k[u % (kAhead + 1)];
      ptx::ldmatrix_x4(f[0][0], f[0][1], f[1][0], f[1][1], (k_row ^ (step % 4 * 32)) + (step / 4 * C::kTileN + j * 16) * 128);
    };
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) s[i][j][0] = s[i][j][1] = s[i][j][2] = s[i][j][3] = 0.f;
    }
    if constexpr (!C::kQInRegisters) load_q(q[0], q_row, 0);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) load_k(u);
#pragma unroll
    for (int step = 0; step < kStepsD; ++step) {
#pragma unroll
      for (int j = 0; j < kStepsN; ++j) {
        const int u = step * kStepsN + j;
        if (u + kAhead < kTotal) load_k(u + kAhead);
        if constexpr (!C::kQInRegisters) {
          if (j == 0 && step + 1 < kStepsD) load_q(q[(step + 1) % 2], q_row, step + 1);
        }
        const uint32_t(&f)[2][2] = k[u % (kAhead + 1)];
#pragma unroll
        for (int i = 0; i < kBlocksM; ++i) {
          const uint32_t(&a)[4] = q[C::kQInRegisters ? step : step % 2][i];
          ptx::mma_m16n8k16<T>(s[i][2 * j], a, f[0]);
          ptx::mma_m16n8k16<T>(s[i][2 * j + 1], a, f[1]);
        }
      }
    }
  }

  __device__ __forceinline__ void apply(MmaTransform transform, float before) {
    if (transform == MmaTransform::kNone) return;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[i][j][e];
          x *= before;
          // tanh(y) = 1 - 2 / (1 + e^2y), to 1e-7; the instruction tanh.approx has 5e-4, which a softcap of 30 makes 0.015 of a logit.
          if (transform == MmaTransform::kSoftcap) x = fmaf(-2.f, ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(x)), 1.f);
        }
      }
    }
  }

  // -inf for what a row must not see.
  __device__ __forceinline__ void mask(const Sequences& sequences, const Sequence& sequence, int first_row, int first_key) {
    const int lane = ptx::tid_x() % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyRange keys = visible_keys(sequences, sequence, first_row + i * 16 + half * 8 + lane / 4);
        const int begin = keys.begin - first_key - lane % 4 * 2, end = keys.end - first_key - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (j * 8 + e < begin || j * 8 + e >= end) s[i][j][2 * half + e] = -INFINITY;
          }
        }
      }
    }
  }

  // The references after this tile.
  __device__ __forceinline__ void update_reference(float exponent) {
    float factor[kBlocksM][2];
    bool changed = false;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = s[i][0][2 * half];
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) largest = fmaxf(largest, s[i][j][2 * half + e]);
        }
        largest = tile::quad_max(largest) * exponent;
        const bool above = largest > reference[i][half] + 8.f;  // of -inf: any number
        factor[i][half] = above ? ptx::ex2_approx_ftz(reference[i][half] - largest) : 1.f;
        if (above) reference[i][half] = largest;
        changed = changed || above;
      }
    }
    if (!__any_sync(0xffffffffu, changed)) return;  // a factor of 1 leaves every bit as it is
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      sum[i][0] *= factor[i][0], sum[i][1] *= factor[i][1];
#pragma unroll
      for (int j = 0; j < kBlocksD; ++j) {
        out[i][j][0] *= factor[i][0], out[i][j][1] *= factor[i][0];
        out[i][j][2] *= factor[i][1], out[i][j][3] *= factor[i][1];
      }
    }
  }

  // out += P . v, of 16 keys after another.
  __device__ __forceinline__ void multiply_pv(uint32_t slot, float exponent) {
    uint32_t p[2][kBlocksM][4];
    constexpr int kWords = kBlocksM * 4;
    const auto exponentials = [&](int step, int begin, int end) {
#pragma unroll
      for (int word = begin; word < end; ++word) {  // word w of row block i: 8 keys 2 * step + w / 2, row half w % 2
        const int i = word / 4, w = word % 4;
        const float* const x = &s[i][2 * step + w / 2][w % 2 * 2];
        // A row that has seen no key yet has only -inf here, too: less any number it stays -inf, and 2^-inf is the 0 that the row needs.
        const float base = fmaxf(reference[i][w % 2], -FLT_MAX);
        const float a = ptx::ex2_approx_ftz(fmaf(x[0], exponent, -base)), b = ptx::ex2_approx_ftz(fmaf(x[1], exponent, -base));
        sum[i][w % 2] += a + b;
        p[step % 2][i][w] = tile::pack_pair(a, b, T{});
      }
    };
    constexpr int kColumns = C::kHeadDim / 16, kTotal = kStepsN * kColumns, kAhead = 2;
    const uint32_t v_row = slot + rows_first();
    uint32_t v[kAhead + 1][2][2];
    const auto load_v = [&](int u) {
      const int step = u / kColumns, c = u % kColumns;
      uint32_t(&f)[2][2] = v[u % (kAhead + 1)];
      ptx::ldmatrix_x4_trans(f[0][0], f[0][1], f[1][0], f[1][1], (v_row ^ (c % 4 * 32)) + (c / 4 * C::kTileN + step * 16) * 128);
    };
#pragma unroll
    for (int u = 0; u < kAhead; ++u) load_v(u);
    exponentials(0, 0, kWords);
#pragma unroll
    for (int step = 0; step < kStepsN; ++step) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (step + 1 < kStepsN) exponentials(step + 1, c * kWords / kColumns, (c + 1) * kWords / kColumns);
        const int u = step * kColumns + c;
        if (u + kAhead < kTotal) load_v(u + kAhead);
        const uint32_t(&f)[2][2] = v[u % (kAhead + 1)];
#pragma unroll
        for (int i = 0; i < kBlocksM; ++i) {
          ptx::mma_m16n8k16<T>(out[i][2 * c], p[step % 2][i], f[0]);
          ptx::mma_m16n8k16<T>(out[i][2 * c + 1], p[step % 2][i], f[1]);
        }
      }
    }
  }

  // A quad holds, of a row, eight columns of each block; transposed over four blocks every lane has eight columns of one, 16 bytes. `to` is the warp's
  // first row. All lanes of a warp call it together.
  __device__ __forceinline__ void store(T* to, int64_t row_stride, float* lse, int rows, bool vector_out) {
    const int lane = ptx::tid_x() % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * 16 + half * 8 + lane / 4;
        const float total = tile::quad_sum(sum[i][half]);
        const bool empty = total == 0.f;
        const float inverse = 1.f / total;
        if (lse != nullptr && lane % 4 == 0 && row < rows) {
          lse[row] = empty ? -INFINITY : reference[i][half] * 0.6931471805599453f + logf(total);
        }
#pragma unroll
        for (int group = 0; group < kBlocksD / 4; ++group) {
          uint32_t w[4];
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const float* const d = &out[i][group * 4 + b][2 * half];
            w[b] = empty ? 0u : tile::pack_pair(d[0] * inverse, d[1] * inverse, T{});
          }
          tile::transpose_quad_words(w);
          if (row >= rows) continue;
          T* const at = to + row * row_stride + group * 32 + lane % 4 * 8;
          if (vector_out) {
            ptx::st_global_v4(at, make_uint4(w[0], w[1], w[2], w[3]));
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) reinterpret_cast<uint16_t*>(at)[e] = static_cast<uint16_t>(w[e / 2] >> (e % 2 * 16));
          }
        }
      }
    }
  }
};

}  // namespace dandan_attention
