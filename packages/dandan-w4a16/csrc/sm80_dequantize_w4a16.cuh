// Computes   rows first .. first + count - 1 of w = round((q - z) * s) as plain rows of k elements, from the kernel-ordered weight.
// Tile       a warp has 16 rows by 64 k, a block of 8 warps 64 rows by 128 k.
// Layout     w4a16.h. A lane's word has pairs of k of two rows; four lanes together have eight neighbours in k: 16 bytes of the result. Codes are
//            exchanged, not weights, so that one word goes from lane to lane for eight weights:
//              before   lane t: 4 words of 16 k, of each the pairs 2t and 2t + 8
//              after    lane t: words 0..3 are the pairs 0, 2, 4, 6 of the eights t and t + 4 of 64 k, both rows
// Bound      bytes: 0.5 + 4 / group read, 2 written for a weight.
// Requires   sm_80; k a multiple of 8; the result from a multiple of 16 bytes.
// Selected   routes.h: in front of a product that PyTorch computes.
#pragma once

#include <dandan/ptx/global.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/tile/quad.cuh>

#include "dequantize.cuh"
#include "w4a16.h"

namespace dandan_w4a16 {

struct DequantizeParams {
  const uint32_t* codes;
  const uint32_t* scales;
  void* out;          // [count, k]
  int64_t first, count, k;
  int blocks_k;       // of 64 k
  int pairs_k;        // of 128 k
  int groups_k;
};

inline constexpr int kDequantizeThreads = 256;

template <typename T, int kGroup>
__global__ void __launch_bounds__(kDequantizeThreads) dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  constexpr int kGroupsOfBlock = kGroup < kBlock ? kBlock / kGroup : 1;
  dandan::ptx::griddepcontrol_launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t block_n = p.first / kBlock + blockIdx.x / p.pairs_k;
  const int block_k = static_cast<int>(blockIdx.x % p.pairs_k) * 2 + warp / 4, fragment = warp % 4;
  const bool live = block_k < p.blocks_k;
  const uint32_t* const codes = p.codes + ((block_n * p.blocks_k + block_k) * 4 + fragment) * 128 + lane * 4;
  const uint4 v = dandan::ptx::ld_global_L1_no_allocate_v4_if(live, codes, make_uint4(0, 0, 0, 0));
  uint2 scales[2] = {};  // of the first and the second 32 k
  if (live) {
    const uint32_t* const from = p.scales + (block_n * p.groups_k + block_k * kBlock / kGroup) * 64 + fragment * 16 + lane / 4 * 2;
#pragma unroll
    for (int q = 0; q < 2; ++q) scales[q] = *reinterpret_cast<const uint2*>(from + (kGroupsOfBlock == 2 ? q * 64 : 0));
  }
  // Bytes of a word: both rows' codes of columns 2t, 2t + 8, 2t + 1, 2t + 9. Put into words of the same form, with an eight of the first 32 k in the
  // place of 2t and one of the second in that of 2t + 8.
  uint32_t words[4] = {__byte_perm(v.x, v.z, 0x6240), __byte_perm(v.x, v.z, 0x7351), __byte_perm(v.y, v.w, 0x6240), __byte_perm(v.y, v.w, 0x7351)};
  dandan::tile::transpose_quad_words(words);
  const RowScale<T> upper[2] = {RowScale<T>(scales[0].x), RowScale<T>(scales[1].x)}, lower[2] = {RowScale<T>(scales[0].y), RowScale<T>(scales[1].y)};
  const int64_t row = block_n * kBlock + fragment * 16 + lane / 4 - p.first;
  const int64_t column = block_k * int64_t{kBlock} + lane % 4 * 8;
  T* const out = static_cast<T*>(p.out) + row * p.k + column;
  dandan::ptx::griddepcontrol_wait();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) high[i] = upper[half].low_codes(words[i] >> (8 * half)), low[i] = lower[half].high_codes(words[i] >> (8 * half));
    if (column + half * 32 >= p.k) continue;
    if (row >= 0 && row < p.count) dandan::ptx::st_global_v4(out + half * 32, make_uint4(high[0], high[1], high[2], high[3]));
    if (row + 8 >= 0 && row + 8 < p.count) dandan::ptx::st_global_v4(out + 8 * p.k + half * 32, make_uint4(low[0], low[1], low[2], low[3]));
  }
}

}  // namespace dandan_w4a16
