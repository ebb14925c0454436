// The running maximum of a thread and the key that orders candidates: larger value first, NaN above all, then the lower index.
#pragma once

#include "common.cuh"

namespace dandan_norm {

__device__ __forceinline__ uint64_t candidate_key(float value, uint32_t index) {
  return (static_cast<uint64_t>(tile::ordered_bits(value)) << 32) | (0xffffffffu - index);
}

__device__ __forceinline__ int64_t index_of(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }

// Best vector so far of a thread that sees vectors in rising order: only a larger maximum, or the first NaN, replaces it.
template <typename T>
struct ArgmaxCandidate {
  float value = -INFINITY;
  uint32_t vector;
  uint4 data;

  __device__ __forceinline__ explicit ArgmaxCandidate(uint32_t first) : vector(first), data(tile::splat<T>(-INFINITY)) {}

  __device__ __forceinline__ void offer(const uint4& v, uint32_t i) {
    const float max = tile::vector_max<T>(v);
    if (!(max <= value) && value == value) value = max, vector = i, data = v;
  }

  // Key of the first element of the best vector that equals the maximum; below every other key when no vector of the row was offered.
  __device__ __forceinline__ uint64_t key(int64_t vectors) const {
    constexpr int kV = kPerVector<T>;
    if (vector >= vectors) return 0;
    float f[kV];
    tile::unpack<T>(data, f);
    int first = 0;
#pragma unroll
    for (int e = kV - 1; e >= 0; --e) {
      if (f[e] == value || (value != value && f[e] != f[e])) first = e;
    }
    return candidate_key(value, vector * kV + first);
  }
};

}  // namespace dandan_norm
