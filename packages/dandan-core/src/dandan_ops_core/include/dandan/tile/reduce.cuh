// Sums and maxima over the threads of a row. blockDim = (threads per row, rows per block); threads per row is a power of two below 32 or a
// multiple of 32, so a row is a part of one warp or whole warps. The order of additions depends on blockDim.x alone.
#pragma once

#include <cstdint>

#include <dandan/tile/vector.cuh>

namespace dandan::tile {

struct Sum {
  static __device__ __forceinline__ float apply(float a, float b) { return __fadd_rn(a, b); }
};

// NaN wins, as in torch.max.
struct Max {
  static __device__ __forceinline__ float apply(float a, float b) { return max_nan(a, b); }
};

inline constexpr int kMaxWarps = 32;

// Scratch of a block; two halves, used in turn, so that one barrier per reduction is enough: nobody writes a half again before every thread
// has passed the barrier after its last read. A row's warps start at a multiple of four, so that four partial results are one load.
template <int kValues>
struct ReduceScratch {
  alignas(16) float values[2][kValues][4 * kMaxWarps];
};

template <typename Op, int kValues>
__device__ __forceinline__ void warp_reduce(float (&v)[kValues], int lanes) {
  if (lanes >= 32) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] = Op::apply(v[i], __shfl_xor_sync(0xffffffffu, v[i], offset));
    }
  } else {
    for (int offset = lanes >> 1; offset > 0; offset >>= 1) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] = Op::apply(v[i], __shfl_xor_sync(0xffffffffu, v[i], offset));
    }
  }
}

// Reduces v over the threads of a row; every thread gets the result. All threads of the block call it. `half` alternates 0, 1, 0, ...
template <typename Op, int kValues, int kScratch>
__device__ __forceinline__ void row_reduce(float (&v)[kValues], ReduceScratch<kScratch>& scratch, int half) {
  static_assert(kValues <= kScratch);
  const int lanes = static_cast<int>(blockDim.x);
  warp_reduce<Op>(v, lanes);
  if (lanes <= 32) return;
  const int warps = lanes >> 5;
  const int first = static_cast<int>(threadIdx.y) * ((warps + 3) & ~3);
  if ((threadIdx.x & 31) == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) scratch.values[half][i][first + (threadIdx.x >> 5)] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    float total = 0.f;
    for (int w = 0; w < warps; w += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&scratch.values[half][i][first + w]);
      total = w == 0 ? four.x : Op::apply(total, four.x);
      if (w + 1 < warps) total = Op::apply(total, four.y);
      if (w + 2 < warps) total = Op::apply(total, four.z);
      if (w + 3 < warps) total = Op::apply(total, four.w);
    }
    v[i] = total;
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
