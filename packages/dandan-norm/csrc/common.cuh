// Shared by the kernels of this package: the compact view of aligned rows, the arithmetic whose order all kernels keep.
#pragma once

#include <type_traits>

#include <dandan/ptx/pdl.cuh>
#include <dandan/tile/cluster_reduce.cuh>
#include <dandan/tile/reduce.cuh>
#include <dandan/tile/rows.cuh>

#include "norm.h"

namespace dandan_norm {

namespace ptx = dandan::ptx;
namespace tile = dandan::tile;
using tile::kPerVector;

// Aligned rows of whole vectors, at most two levels, every number in 32 bits. A first version with parameters of a few hundred bytes and
// 64-bit arithmetic took 1.76 us for a row of 1024 where this form took 1.43 (H200, 2026-12).
struct AlignedRows {
  uint4* data;
  int outer, inner;  // strides of the two levels, in bytes; one level: `inner` alone
};

struct AlignedSpace {
  int rows, vectors;           // rows, vectors in a row
  dandan::FastDivisor inner;   // size of the inner level; divisor 0: one level
};

__device__ __forceinline__ uint4* row_of(const AlignedRows& t, int quotient, int rest) {
  return reinterpret_cast<uint4*>(ptx::mad_wide(quotient, t.outer, ptx::mad_wide(rest, t.inner, reinterpret_cast<int64_t>(t.data))));
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
  const bool two = p.space.levels == 2;
  return {static_cast<uint4*>(t.data), two ? static_cast<int>(t.strides.level[0] * dtype_size(dtype)) : 0,
          static_cast<int>(t.strides.level[two ? 1 : 0] * dtype_size(dtype))};
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

// A lane's partial sums, one for each vector (modulo kSlots), added pairwise: i and i + half. Unused slots are zero and change nothing.
template <typename V, int kSlots>
__device__ __forceinline__ V slot_sum(V (&v)[kSlots]) {
#pragma unroll
  for (int half = kSlots / 2; half > 0; half >>= 1) {
#pragma unroll
    for (int i = 0; i < half; ++i) v[i] = tile::Sum::apply(v[i], v[i + half]);
  }
  return v[0];
}

// Lanes that a thread with kVectors vectors stands for. A row of up to 1536 vectors is added as by lanes of two vectors; with four a thread, there are
// half as many threads, each for two lanes: vectors 0, 2 and vectors 1, 3.
template <int kVectors>
inline constexpr int kLanesOf = kVectors == 4 ? 2 : 1;

template <typename V, int kVectors>
__device__ __forceinline__ void lane_sums(V (&partial)[kVectors], V (&lanes)[kLanesOf<kVectors>]) {
  if constexpr (kVectors == 4) {
    lanes[0] = tile::Sum::apply(partial[0], partial[2]);
    lanes[1] = tile::Sum::apply(partial[1], partial[3]);
  } else {
    lanes[0] = slot_sum(partial);
  }
}

// Narrow rows of layer_norm are folded onto the 32 lanes of one warp, however many warps hold them: vector i is slot i / 32 of lane i % 32. The slots of
// a lane are added pairwise, first those of a thread (slot_sum), then here those of the warps; at last every warp adds the lanes. Any power of two of
// warps, each thread with a power of two of slots, gives the same bits.
//
// Adds kValues numbers over the threads of such a row, which all get the results. Value n of this thread goes to scratch[n][first + thread]. The barrier
// is before the reads alone: nobody may write the same scratch again before another barrier.
template <int kMaxWarps, typename V, int kValues, int kThreads>
__device__ __forceinline__ void fold_warps(V (&v)[kValues], V (&scratch)[kValues][kThreads], int first, int thread, int warps) {
  if (kMaxWarps > 1 && warps > 1) {
#pragma unroll
    for (int n = 0; n < kValues; ++n) scratch[n][first + thread] = v[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
      V part[kMaxWarps];
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) part[w] = w < warps ? scratch[n][first + 32 * w + (thread & 31)] : V{};
      v[n] = slot_sum(part);
    }
  }
#pragma unroll
  for (int n = 0; n < kValues; ++n) v[n] = tile::Sum::warp(v[n]);
}

// What the sums of vectors, lanes, warps and blocks are added in. Rows of fp32 lose the roundings of large partial sums in fp64: a dozen additions a
// thread.
template <typename T>
using Accumulator = std::conditional_t<sizeof(T) == 4, double, float>;

// Sum of a vector of exponentials. fp32: with what each addition rounds off (Knuth's two-sum), since the largest term is near the sum itself.
template <typename T>
__device__ __forceinline__ Accumulator<T> exponential_sum(const float (&f)[kPerVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    float sum = f[0], lost = 0.f;
#pragma unroll
    for (int e = 1; e < kPerVector<T>; ++e) {
      const float next = __fadd_rn(sum, f[e]);
      const float part = __fsub_rn(next, sum);
      lost = __fadd_rn(lost, __fadd_rn(__fsub_rn(sum, __fsub_rn(next, part)), __fsub_rn(f[e], part)));
      sum = next;
    }
    return static_cast<double>(sum) + static_cast<double>(lost);
  } else {
    return vector_sum(f);
  }
}

// 1 / sqrt(v). The approximate instruction is off by up to one unit in the last place of fp32: nothing for a 16-bit result. fp32: rounded root and
// rounded reciprocal, corrected by one step of Newton whose residual is exact to the last bit.
template <typename T>
__device__ __forceinline__ float inverse_sqrt(float v) {
  if constexpr (sizeof(T) == 4) {
    const float r = __frcp_rn(__fsqrt_rn(v));
    const float product = __fmul_rn(r, v), lost = __fmaf_rn(r, v, -product);
    const float residual = __fmaf_rn(-lost, r, __fmaf_rn(-product, r, 1.f));
    return __fmaf_rn(__fmul_rn(0.5f, r), residual, r);
  } else {
    return rsqrtf(v);
  }
}

// Mean of a row. The zero makes it +0 for a row of negative zeros, whose sum has the sign of whatever zeros were added beside them.
template <typename V>
__device__ __forceinline__ float mean_of(V sum, float inverse_cols) {
  return __fmaf_rn(static_cast<float>(sum), inverse_cols, 0.f);
}

// Centre and variance of a row from the sums of the centred row: {sum of squares}, in fp32 also {., sum}.
template <typename T>
struct Centre {
  float mean, rest = 0.f, variance;
  template <int kValues>
  __device__ __forceinline__ Centre(float rounded_mean, const Accumulator<T> (&moments)[kValues], float inverse_cols) : mean(rounded_mean) {
    variance = __fmul_rn(static_cast<float>(moments[0]), inverse_cols);
    if constexpr (sizeof(T) == 4) {
      rest = mean_of(moments[1], inverse_cols);
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

// Divides many numbers by one positive number. fp32: the remainder of the product corrects its rounding.
template <typename T>
struct Quotient {
  float divisor, reciprocal;
  __device__ __forceinline__ explicit Quotient(float d) : divisor(d) {
    if constexpr (sizeof(T) == 4) {
      reciprocal = __frcp_rn(d);
    } else {
      reciprocal = __fdividef(1.f, d);
    }
  }
  __device__ __forceinline__ float operator()(float v) const {
    const float q = __fmul_rn(v, reciprocal);
    if constexpr (sizeof(T) == 4) return __fmaf_rn(__fmaf_rn(-q, divisor, v), reciprocal, q);
    return q;
  }
};

}  // namespace dandan_norm
