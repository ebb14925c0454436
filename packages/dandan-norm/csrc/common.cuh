// Shared by the kernels of this package: the compact view of aligned rows, the arithmetic whose order all kernels keep, the grid.
#pragma once

#include <algorithm>
#include <stdexcept>

#include <dandan/host/launch.h>
#include <dandan/ptx/pdl.cuh>
#include <dandan/tile/cluster_reduce.cuh>
#include <dandan/tile/reduce.cuh>
#include <dandan/tile/rows.cuh>

#include "norm.h"

namespace dandan_norm {

namespace ptx = dandan::ptx;
namespace tile = dandan::tile;
using tile::kPerVector;

// Calls f with a value of the element type.
template <typename F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kHalf: return f(__half{});
    case DType::kBFloat16: return f(__nv_bfloat16{});
    case DType::kFloat: return f(float{});
  }
}

// Aligned rows of whole vectors, at most two levels, every number in 32 bits. Kernel parameters are fetched from cold memory at each launch: a
// struct of a few hundred bytes cost 0.3 us of a 1.7 us kernel (H200, 2026-12).
struct AlignedRows {
  uint4* data;
  int outer, inner;  // strides of the two levels, in vectors; one level: `inner` alone
};

struct AlignedSpace {
  int rows, vectors;           // rows, vectors in a row
  dandan::FastDivisor inner;   // size of the inner level; divisor 0: one level
};

__device__ __forceinline__ uint4* row_of(const AlignedRows& t, int quotient, int rest) {
  return t.data + ptx::mad_wide(quotient, t.outer, ptx::mad_wide(rest, t.inner, 0));
}

// Splits a row number into the two levels.
__device__ __forceinline__ void split_row(const AlignedSpace& space, int row, int& quotient, int& rest) {
  quotient = 0;
  rest = row;
  if (space.inner.divisor != 0) {
    quotient = static_cast<int>(tile::divide(static_cast<uint32_t>(row), space.inner));
    rest = row - quotient * static_cast<int>(space.inner.divisor);
  }
}

inline AlignedSpace aligned_space(DType dtype, const Params& p) {
  AlignedSpace space;
  space.rows = static_cast<int>(p.space.rows);
  space.vectors = static_cast<int>(p.cols / (16 / dtype_size(dtype)));
  space.inner = p.space.levels == 2 ? dandan::make_fast_divisor(static_cast<uint32_t>(p.space.sizes[1])) : dandan::FastDivisor{0, 0, 0};
  return space;
}

inline AlignedRows aligned_rows(DType dtype, const Params& p, const Rows& t) {
  const int per_vector = 16 / dtype_size(dtype);
  const bool two = p.space.levels == 2;
  return {static_cast<uint4*>(t.data), two ? static_cast<int>(t.strides.level[0] / per_vector) : 0,
          static_cast<int>(t.strides.level[two ? 1 : 0] / per_vector)};
}

// Sum of a vector: even and odd elements in two chains.
template <int kV>
__device__ __forceinline__ float vector_sum(const float (&f)[kV]) {
  float a = f[0], b = f[1];
#pragma unroll
  for (int e = 2; e < kV; e += 2) a = __fadd_rn(a, f[e]), b = __fadd_rn(b, f[e + 1]);
  return __fadd_rn(a, b);
}

template <int kV>
__device__ __forceinline__ float vector_sum_squares(const float (&f)[kV]) {
  float a = __fmul_rn(f[0], f[0]), b = __fmul_rn(f[1], f[1]);
#pragma unroll
  for (int e = 2; e < kV; e += 2) a = __fmaf_rn(f[e], f[e], a), b = __fmaf_rn(f[e + 1], f[e + 1], b);
  return __fadd_rn(a, b);
}

// A thread's partial sums, one for each vector (modulo kSlots), added pairwise: i and i + half. Unused slots are zero and change nothing, so
// kernels with 2, 4 or 8 slots agree bit for bit.
template <int kSlots>
__device__ __forceinline__ float slot_sum(float (&v)[kSlots]) {
#pragma unroll
  for (int half = kSlots / 2; half > 0; half >>= 1) {
#pragma unroll
    for (int i = 0; i < half; ++i) v[i] = __fadd_rn(v[i], v[i + half]);
  }
  return v[0];
}

// 1 / sqrt(v). The approximate instruction is off by up to one unit in the last place of fp32: nothing for a 16-bit result.
template <typename T>
__device__ __forceinline__ float inverse_sqrt(float v) {
  if constexpr (sizeof(T) == 4) {
    return __frcp_rn(__fsqrt_rn(v));
  } else {
    return rsqrtf(v);
  }
}

// Centre and variance of a row from the sums of the centred row: {sum of squares}, in fp32 also {., sum}.
template <typename T>
struct Centre {
  float mean, rest = 0.f, variance;
  template <int kValues>
  __device__ __forceinline__ Centre(float rounded_mean, const float (&moments)[kValues], float inverse_cols) : mean(rounded_mean) {
    variance = __fmul_rn(moments[0], inverse_cols);
    if constexpr (sizeof(T) == 4) {
      rest = __fmul_rn(moments[1], inverse_cols);
      variance = fmaxf(__fmaf_rn(-rest, rest, variance), 0.f);
    }
  }
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (sizeof(T) == 4) return __fsub_rn(__fsub_rn(x, mean), rest);
    return __fsub_rn(x, mean);
  }
};

inline constexpr float kLog2e = 1.44269504f;

// exp(x - max) up to a factor that all elements of a row share. 16-bit results: one fma and one ex2, where the rounding of max*log2(e) is that
// factor. fp32: exp of the exact difference.
template <typename T>
struct Exp {
  float shift;
  __device__ __forceinline__ explicit Exp(float max) {
    if constexpr (sizeof(T) == 4) {
      shift = max;
    } else {
      shift = __fmul_rn(max, kLog2e);
    }
  }
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (sizeof(T) == 4) {
      return expf(__fsub_rn(x, shift));
    } else {
      float r;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fmaf_rn(x, kLog2e, -shift)));
      return r;
    }
  }
};

template <typename T>
__device__ __forceinline__ float reciprocal(float v) {
  if constexpr (sizeof(T) == 4) {
    return __frcp_rn(v);
  } else {
    return __fdividef(1.f, v);
  }
}

// One block for each `tile.rows` rows, or as many as a grid can have: kernels for any shape loop.
inline dandan::host::LaunchConfig row_config(int64_t rows, const Launch& launch) {
  const int64_t blocks = std::min<int64_t>((rows + launch.tile.rows - 1) / launch.tile.rows, 0x7fffffff / launch.tile.cluster);
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks * launch.tile.cluster));
  config.block = dim3(static_cast<unsigned>(launch.tile.threads), static_cast<unsigned>(launch.tile.rows));
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.cluster = launch.tile.cluster;
  return config;
}

}  // namespace dandan_norm
