// Online softmax and softcap on the accumulators of a warp group: s[4j + 2h + e] of a thread belongs to its row h (0 or 1), key 8j + 2 * (lane % 4) + e.
#pragma once

#include <cstdint>

#include <dandan/ptx/math.cuh>
#include <dandan/tile/quad_reduce.cuh>

namespace dandan_attention {

namespace ptx = dandan::ptx;
namespace tile = dandan::tile;

// A row's reference is its largest logit so far, kept until one exceeds it by 2^8 (`slack`): sums then fit fp32 and P the element type all the same,
// and most tiles leave the result's registers alone. A row decides for itself: its bits do not depend on its neighbours. References are in the
// units of s; P is 2^(exponent * (s - reference)).
struct OnlineSoftmax {
  float reference[2], sum[2];  // sum: of this thread's columns alone

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  // The largest of a row, for both rows.
  template <int kCount>
  static __device__ __forceinline__ void largest(const float (&s)[kCount], float (&m)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float a = fmaxf(s[2 * h], s[2 * h + 1]), b = fmaxf(s[2 * h + 4], s[2 * h + 5]);
#pragma unroll
      for (int j = 2; j < kCount / 4; j += 2) {
        a = fmaxf(a, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        if (j + 1 < kCount / 4) b = fmaxf(b, fmaxf(s[4 * j + 2 * h + 4], s[4 * j + 2 * h + 5]));
      }
      m[h] = tile::quad_max(fmaxf(a, b));
    }
  }

  // The references after logits whose largest are m; true: a row of this thread got a new one, and what was summed before counts `factor` times.
  __device__ __forceinline__ bool refer(const float (&m)[2], float exponent, float slack, float (&factor)[2]) {
    const bool grows[2] = {m[0] > reference[0] + slack, m[1] > reference[1] + slack};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = grows[h] ? ptx::ex2_approx_ftz((reference[h] - m[h]) * exponent) : 1.f;
      reference[h] = grows[h] ? m[h] : reference[h];
      sum[h] *= factor[h];
    }
    return grows[0] || grows[1];
  }

  // What is subtracted in the exponent.
  __device__ __forceinline__ float shift(int h, float exponent) const {
    return reference[h] == -INFINITY ? 0.f : reference[h] * exponent;  // a row that has seen no key: 2^-inf is 0
  }

  // s becomes P, 2 to the power of exponent_of(s, row). Without a branch: the exponentials shall be one block with what they can run beside.
  template <int kCount, class ExponentOf>
  __device__ __forceinline__ void exponentials(float (&s)[kCount], ExponentOf exponent_of) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int h = i / 2 % 2;
      s[i] = ptx::ex2_approx_ftz(exponent_of(s[i], h));
      sum[h] += s[i];
    }
  }

  // Logits become P; returns what refer does.
  template <int kCount>
  __device__ __forceinline__ bool next(float (&s)[kCount], float exponent, float slack, float (&factor)[2]) {
    float m[2];
    largest(s, m);
    const bool grows = refer(m, exponent, slack, factor);
    const float shifts[2] = {shift(0, exponent), shift(1, exponent)};
    exponentials(s, [&](float x, int h) { return fmaf(x, exponent, -shifts[h]); });
    return grows;
  }
};

// Logits that the exponential cannot scale by itself: softcap * tanh(scale * x / softcap), or scale * x with a scale that is not above 0, in units of
// log2(e).
//
// tanh is an odd polynomial where |x| < limit: fused multiply-adds have room beside the tensor cores, the special function unit has not. It only grows, so
// the largest logit is that of the largest x, and the polynomial's last multiply-add subtracts the reference: three more instructions for a logit than
// without softcap. The error of tanh is below 1e-6.
struct Transform {
  bool softcap;
  bool scales;      // x is multiplied by `inner` first: a scale that is not above 0, or out of the range where the coefficients take it
  float inner;
  float odd[3];     // x * (odd[0] + odd[1] x^2 + odd[2] x^4)
  float limit;
  float argument, outer;  // elsewhere: outer * (1 - 2 / (1 + 2^(argument * x)))

  __device__ __forceinline__ float factor_near(float x) const {
    const float z = x * x;
    return fmaf(fmaf(odd[2], z, odd[1]), z, odd[0]);
  }
  // The logit less `shift`; near or far is decided by x alone. Without a branch.
  __device__ __forceinline__ float of(float x, float shift) const {
    const float near = fmaf(x, factor_near(x), -shift);
    const float far = fmaf(-2.f * outer, ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(argument * x)), outer) - shift;
    const uint32_t takes_near = static_cast<uint32_t>(static_cast<int32_t>(__float_as_uint(fabsf(x) - limit)) >> 31);
    return __uint_as_float((__float_as_uint(near) & takes_near) | (__float_as_uint(far) & ~takes_near));
  }

  template <int kCount>
  __device__ __forceinline__ void scale(float (&s)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= inner;
  }

  // Whether all x of the warp are near, or a little less.
  template <int kCount>
  __device__ __forceinline__ bool all_near(const float (&s)[kCount]) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits |= __float_as_uint(s[i]);
    return softcap && __all_sync(0xffffffffu, __uint_as_float(bits & 0x7fffffffu) < limit);
  }
};

// Keys outside of [begin, end) of both rows become `value`. `first`: the first key of this thread.
template <int kCount>
__device__ __forceinline__ void mask(float (&s)[kCount], int first, const int (&begin)[2], const int (&end)[2], bool left, float value) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int e = end[h] - first, b = begin[h] - first;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * j + i >= e) s[4 * j + 2 * h + i] = value;
      }
    }
    if (left) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (8 * j + i < b) s[4 * j + 2 * h + i] = value;
        }
      }
    }
  }
}

}  // namespace dandan_attention
