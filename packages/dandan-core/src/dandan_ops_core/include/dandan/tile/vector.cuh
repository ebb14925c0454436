// A 16-byte vector of fp16, bf16 or fp32 elements and its conversions to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <dandan/ptx/global.cuh>

namespace dandan::tile {

// Elements in one 16-byte vector.
template <typename T>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(float v) { return v; }

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }

__device__ __forceinline__ float2 unpack_pair(uint32_t word, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
// A bf16 is the upper half of an fp32: two integer instructions for a pair.
__device__ __forceinline__ float2 unpack_pair(uint32_t word, __nv_bfloat16) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ __forceinline__ uint32_t pack_pair(float a, float b, __half) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[kPerVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
  } else {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_pair(words[i], T{});
      f[2 * i] = pair.x, f[2 * i + 1] = pair.y;
    }
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&f)[kPerVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  } else {
    return make_uint4(pack_pair(f[0], f[1], T{}), pack_pair(f[2], f[3], T{}), pack_pair(f[4], f[5], T{}),
                      pack_pair(f[6], f[7], T{}));
  }
}

// Largest of two packed pairs; NaN wins.
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b, __half) {
  const __half2 r = __hmax2_nan(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 r = __hmax2_nan(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&r);
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Largest element of a vector; NaN wins.
template <typename T>
__device__ __forceinline__ float vector_max(const uint4& v) {
  if constexpr (sizeof(T) == 4) {
    return max_nan(max_nan(__uint_as_float(v.x), __uint_as_float(v.y)), max_nan(__uint_as_float(v.z), __uint_as_float(v.w)));
  } else {
    const float2 pair = unpack_pair(max_pair(max_pair(v.x, v.y, T{}), max_pair(v.z, v.w, T{}), T{}), T{});
    return max_nan(pair.x, pair.y);
  }
}

// Keeps the compiler from carrying converted copies of `v` across this point: converting again is cheaper than the registers.
__device__ __forceinline__ void keep_packed(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

// A vector whose every element is `value`.
template <typename T>
__device__ __forceinline__ uint4 splat(float value) {
  float f[kPerVector<T>];
#pragma unroll
  for (int e = 0; e < kPerVector<T>; ++e) f[e] = value;
  return pack<T>(f);
}

}  // namespace dandan::tile
