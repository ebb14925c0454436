// Computes   per-head RMSNorm of q and k, rotary embedding, and the write of k and v into their pages, each where it is asked for, see rope_write.h.
// Tile       head_dim / 8 lanes take the same 16 bytes of kHeads heads of one token; heads of q, k and v are counted through.
// Pipeline   all loads of a thread, then norm, rotation, stores.
// Bound      bytes: 4 * head_dim for each head of q, k and v, written twice where k_out and the cache are both asked for.
// Requires   sm_80; all rows at multiples of 16 bytes; rotary_dim a multiple of 16.
// Selected   not built yet: no operator calls it.
#pragma once

#include <cstdint>

#include <dandan/ptx/global.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/tile/vector.cuh>

#include "rope_write.h"

namespace dandan_attention {

namespace ptx = dandan::ptx;
namespace tile = dandan::tile;

inline constexpr int kRopeThreads = 256, kRopeHeads = 4;

__device__ __forceinline__ int64_t index_at(const void* p, bool is_64, int64_t i) {
  return is_64 ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kRopeThreads) sm80_rope_write_kernel(const __grid_constant__ RopeWriteParams p) {
  constexpr int kLanes = kHeadDim / 8, kHeads = kRopeHeads;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, column = lane * 8;
  const int heads_q = p.q != nullptr ? p.num_heads_q : 0, heads_kv = p.num_heads_kv, heads = heads_q + heads_kv * (p.v != nullptr ? 2 : 1);
  const int sets = (heads + kHeads - 1) / kHeads;
  const int64_t set = (int64_t{blockIdx.x} * kRopeThreads + threadIdx.x) / kLanes;
  const int64_t token = set / sets < p.tokens ? set / sets : p.tokens - 1;
  const int first = static_cast<int>(set % sets) * kHeads, end = set / sets < p.tokens ? min(heads, first + kHeads) : 0;  // lanes without work stay: exchanges

  ptx::griddepcontrol_wait();
  uint4 x[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = min(first + i, heads - 1), part = head < heads_q ? 0 : head < heads_q + heads_kv ? 1 : 2;
    const void* const from = part == 0 ? p.q : part == 1 ? p.k : p.v;
    const TokenStrides& s = part == 0 ? p.q_strides : part == 1 ? p.k_strides : p.v_strides;
    const int own = head - (part == 0 ? 0 : part == 1 ? heads_q : heads_q + heads_kv);
    x[i] = ptx::ld_global_v4(static_cast<const T*>(from) + token * s.token + own * s.head + column);
  }
  const int64_t slot = p.slot_mapping != nullptr ? index_at(p.slot_mapping, p.slots_are_64, token) : -1;
  float cosine[8], sine[8];
  const bool rotates = p.cos != nullptr, turned = rotates && column < p.rotary_dim;
  const int half = p.rotary_dim / 2;
  if (turned) {
    int64_t position = index_at(p.positions, p.positions_are_64, token);
    position = position < 0 ? 0 : position >= p.max_positions ? p.max_positions - 1 : position;
    // Halves: eight angles of this lane's columns. Interleaved: four, of pairs.
    const int at = p.interleaved ? column / 2 : column % half;
    const float* const c = static_cast<const float*>(p.cos) + position * p.table_stride + at;
    const float* const s = static_cast<const float*>(p.sin) + position * p.table_stride + at;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e >= 4 && p.interleaved) break;
      cosine[e] = c[e], sine[e] = s[e];
    }
  }

#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = min(first + i, heads - 1), part = head < heads_q ? 0 : head < heads_q + heads_kv ? 1 : 2;
    const int own = head - (part == 0 ? 0 : part == 1 ? heads_q : heads_q + heads_kv);
    float v[8];
    tile::unpack<T>(x[i], v);
    if (p.q_weight != nullptr) {
      float sum = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(v[e], v[e], sum);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (part != 2) {
        const float scale = 1.f / sqrtf(sum * (1.f / kHeadDim) + p.eps);
        float w[8];
        tile::unpack<T>(ptx::ld_global_v4(static_cast<const T*>(part == 0 ? p.q_weight : p.k_weight) + column), w);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = v[e] * scale * w[e];
        x[i] = tile::pack<T>(v);
        tile::unpack<T>(x[i], v);  // rounded, as a norm of its own would leave it
      }
    }
    if (rotates) {
      float other[8];
      // The other column of a pair lies in the lane half of the turned columns away, or in this one.
      const int partner = static_cast<int>(threadIdx.x) % 32 + (!turned ? 0 : column < half ? half / 8 : -half / 8);
      const uint4 theirs = make_uint4(__shfl_sync(0xffffffffu, x[i].x, partner), __shfl_sync(0xffffffffu, x[i].y, partner),
                                      __shfl_sync(0xffffffffu, x[i].z, partner), __shfl_sync(0xffffffffu, x[i].w, partner));
      tile::unpack<T>(theirs, other);
      if (turned && part != 2) {
        float r[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float c = p.interleaved ? cosine[e / 2] : cosine[e], s = p.interleaved ? sine[e / 2] : sine[e];
          const float pair = p.interleaved ? v[e ^ 1] : other[e];
          const bool second = p.interleaved ? e % 2 != 0 : column >= half;
          const float a = __fmul_rn(v[e], c), b = __fmul_rn(pair, s);
          r[e] = second ? __fadd_rn(a, b) : __fsub_rn(a, b);
        }
        x[i] = tile::pack<T>(r);
      }
    }
    if (first + i >= end) continue;
    void* const to = part == 0 ? p.q_out : part == 1 ? p.k_out : nullptr;
    if (to != nullptr) {
      const TokenStrides& s = part == 0 ? p.q_out_strides : p.k_out_strides;
      ptx::st_global_v4(static_cast<T*>(to) + token * s.token + own * s.head + column, x[i]);
    }
    void* const cache = part == 1 ? p.k_cache : part == 2 ? p.v_cache : nullptr;
    if (cache != nullptr && slot >= 0 && slot < p.num_pages * p.page_size) {
      const PageStrides& s = part == 1 ? p.k_cache_strides : p.v_cache_strides;
      ptx::st_global_v4(static_cast<T*>(cache) + slot / p.page_size * s.page + slot % p.page_size * s.slot + own * s.head + column, x[i]);
    }
  }
  ptx::griddepcontrol_launch_dependents();
}

}  // namespace dandan_attention
