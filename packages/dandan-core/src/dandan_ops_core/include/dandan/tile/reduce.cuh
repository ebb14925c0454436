// Sums and maxima over the threads of a row. blockDim = (threads per row, rows per block); threads per row is a power of two below 32 or a
// multiple of 32, so a row is a part of one warp or whole warps. The order of additions depends on blockDim.x alone.
#pragma once

#include <cstdint>

#include <dandan/tile/vector.cuh>

namespace dandan::tile {

// Orders like the float, NaN above all, both zeros alike; and back.
__device__ __forceinline__ uint32_t ordered_bits(float v) {
  if (v != v) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(__fadd_rn(v, 0.f));
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered_bits(uint32_t bits) {
  return __uint_as_float((bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits);
}

struct Sum {
  static __device__ __forceinline__ float apply(float a, float b) { return __fadd_rn(a, b); }
  static __device__ __forceinline__ double apply(double a, double b) { return __dadd_rn(a, b); }
  template <typename V>
  static __device__ __forceinline__ V warp(V v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) v = apply(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
  }
};

// NaN wins, as in torch.max.
struct Max {
  static __device__ __forceinline__ float apply(float a, float b) { return max_nan(a, b); }
  // One integer reduction of the hardware instead of five exchanges.
  static __device__ __forceinline__ float warp(float v) { return from_ordered_bits(__reduce_max_sync(0xffffffffu, ordered_bits(v))); }
};

inline constexpr int kMaxWarps = 32;

// Scratch of a block; two halves, used in turn, so that one barrier per reduction is enough: nobody writes a half again before every thread
// has passed the barrier after its last read. A row's partial results start at a multiple of four, so that four of them are one or two loads.
template <typename V, int kValues>
struct ReduceScratch {
  alignas(16) V values[2][kValues][4 * kMaxWarps];
};

// Reduces kValues numbers over the threads of a row; every thread gets the results. All threads of the block call it. `half` alternates 0, 1, ...
//
// A thread may stand for kLanes lanes of a row: in[i][l] is what lane threadIdx.x + l * blockDim.x would hold if every lane had a thread of its own.
// Lanes are added as such threads would add them (whole warps only), so a row has the same bits whether one thread or two do the work.
template <typename Op, typename V, int kValues, int kLanes>
__device__ __forceinline__ void row_reduce(const V (&in)[kValues][kLanes], V (&out)[kValues], ReduceScratch<V, kValues>& scratch, int half) {
  const int threads = static_cast<int>(blockDim.x);
  V v[kValues][kLanes];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
#pragma unroll
    for (int l = 0; l < kLanes; ++l) v[i][l] = threads < 32 ? in[i][l] : Op::warp(in[i][l]);
  }
  if (threads < 32) {  // kLanes is 1
    for (int offset = threads >> 1; offset > 0; offset >>= 1) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i][0] = Op::apply(v[i][0], __shfl_xor_sync(0xffffffffu, v[i][0], offset));
    }
  }
  if (threads <= 32) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      out[i] = v[i][0];
#pragma unroll
      for (int l = 1; l < kLanes; ++l) out[i] = Op::apply(out[i], v[i][l]);
    }
    return;
  }
  const int warps = threads >> 5;
  const int count = warps * kLanes;
  const int first = static_cast<int>(threadIdx.y) * ((count + 3) & ~3);
  if ((threadIdx.x & 31) == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) scratch.values[half][i][first + l * warps + (threadIdx.x >> 5)] = v[i][l];
    }
  }
  __syncthreads();
  struct alignas(16) Four {
    V x, y, z, w;
  };
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    V total{};
    for (int w = 0; w < count; w += 4) {
      const Four four = *reinterpret_cast<const Four*>(&scratch.values[half][i][first + w]);
      total = w == 0 ? four.x : Op::apply(total, four.x);
      if (w + 1 < count) total = Op::apply(total, four.y);
      if (w + 2 < count) total = Op::apply(total, four.z);
      if (w + 3 < count) total = Op::apply(total, four.w);
    }
    out[i] = total;
  }
}

struct KeyScratch {
  uint64_t values[2][kMaxWarps];
};

// Largest key of the lanes of a warp that share a row. Whole warps: two integer reductions of the hardware, high word then low.
__device__ __forceinline__ uint64_t warp_reduce_max(uint64_t key, int lanes) {
  if (lanes >= 32) {
    const uint32_t high = static_cast<uint32_t>(key >> 32);
    const uint32_t best = __reduce_max_sync(0xffffffffu, high);
    const uint32_t low = __reduce_max_sync(0xffffffffu, high == best ? static_cast<uint32_t>(key) : 0u);
    return (static_cast<uint64_t>(best) << 32) | low;
  }
  for (int offset = lanes >> 1; offset > 0; offset >>= 1) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, key, offset);
    key = other > key ? other : key;
  }
  return key;
}

// Largest key of a row; every thread gets it. Otherwise as row_reduce.
__device__ __forceinline__ uint64_t row_reduce_max(uint64_t key, KeyScratch& scratch, int half) {
  const int lanes = static_cast<int>(blockDim.x);
  key = warp_reduce_max(key, lanes);
  if (lanes <= 32) return key;
  const int warps = lanes >> 5;
  const int first = static_cast<int>(threadIdx.y) * warps;
  if ((threadIdx.x & 31) == 0) scratch.values[half][first + (threadIdx.x >> 5)] = key;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x & 31);
  return warp_reduce_max(lane < warps ? scratch.values[half][first + lane] : 0, 32);
}

}  // namespace dandan::tile
