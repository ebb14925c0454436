// Where a row of a strided tensor starts, and reading and writing its 16-byte vectors when it is not made of whole aligned ones.
#pragma once

#include <dandan/tile/row_space.h>
#include <dandan/tile/vector.cuh>

namespace dandan::tile {

__device__ __forceinline__ uint32_t divide(uint32_t n, const FastDivisor& d) {
  return static_cast<uint32_t>((static_cast<uint64_t>(n) * d.magic) >> d.shift);
}

// Element offset of row `row`.
__device__ __forceinline__ int64_t row_offset(const RowSpace& space, const RowStrides& strides, int64_t row) {
  int64_t offset = 0;
#pragma unroll 1
  for (int level = space.levels - 1; level > 0; --level) {
    const int64_t quotient = row / space.sizes[level];
    offset += (row - quotient * space.sizes[level]) * strides.level[level];
    row = quotient;
  }
  return offset + row * strides.level[0];
}

// Vector `i` of a row of `cols` elements that lie `stride` apart, element by element; past the row stands `filler`.
template <typename T>
__device__ __noinline__ uint4 gather_vector(const T* row, int64_t i, int64_t cols, int64_t stride, uint4 filler) {
  constexpr int kV = kPerVector<T>;
  union {
    uint4 v;
    T e[kV];
  } out;
  out.v = filler;
#pragma unroll
  for (int e = 0; e < kV; ++e) {
    const int64_t col = i * kV + e;
    if (col < cols) out.e[e] = row[col * stride];
  }
  return out.v;
}

template <typename T>
__device__ __noinline__ void scatter_vector(T* row, int64_t i, int64_t cols, int64_t stride, uint4 value) {
  constexpr int kV = kPerVector<T>;
  union {
    uint4 v;
    T e[kV];
  } in;
  in.v = value;
#pragma unroll
  for (int e = 0; e < kV; ++e) {
    const int64_t col = i * kV + e;
    if (col < cols) row[col * stride] = in.e[e];
  }
}

}  // namespace dandan::tile
