// Codes to weights in registers: w = round(float(q - z) * float(s)), eight at a time.
//
// q is put into the mantissa of a constant; taking the constant and z off leaves q - z exactly, and one multiplication rounds once, as the rule does:
// q - z has 5 bits and s 11 (8), so that their product is exact before it is rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace dandan_w4a16 {

__device__ __forceinline__ uint32_t bits(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat162 v) { return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ __half2 half2_of(uint32_t v) { return *reinterpret_cast<__half2*>(&v); }
__device__ __forceinline__ __nv_bfloat162 bfloat162_of(uint32_t v) { return *reinterpret_cast<__nv_bfloat162*>(&v); }

// (v & mask) | constant
template <uint32_t kMask, uint32_t kConstant>
__device__ __forceinline__ uint32_t take(uint32_t v) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(v), "n"(kMask), "n"(kConstant));
  return r;
}

// Scale and zero point of one row: both halves of a register each.
template <typename T>
struct RowScale;

template <>
struct RowScale<__half> {
  uint32_t scale, low, high;  // low = 1024 + z, for codes in bits 3..0; high = -(64 + z), for codes in bits 7..4 (of 1024 + 16 q, over 16)
  __device__ __forceinline__ explicit RowScale(uint32_t packed) {
    scale = __byte_perm(packed, 0, 0x1010);
    const uint32_t zero = __byte_perm(packed, 0, 0x3232);
    low = bits(__hadd2(half2_of(zero), half2_of(0x64006400)));
    high = bits(__hneg2(__hadd2(half2_of(zero), half2_of(0x54005400))));
  }
  __device__ __forceinline__ uint32_t low_codes(uint32_t v) const {
    return bits(__hmul2(__hsub2(half2_of(take<0x000F000F, 0x64006400>(v)), half2_of(low)), half2_of(scale)));
  }
  __device__ __forceinline__ uint32_t high_codes(uint32_t v) const {
    return bits(__hmul2(__hfma2(half2_of(take<0x00F000F0, 0x64006400>(v)), half2_of(0x2C002C00), half2_of(high)), half2_of(scale)));
  }
};

template <>
struct RowScale<__nv_bfloat16> {
  uint32_t scale, low;  // low = 128 + z
  __device__ __forceinline__ explicit RowScale(uint32_t packed) {
    scale = __byte_perm(packed, 0, 0x1010);
    low = bits(__hadd2(bfloat162_of(__byte_perm(packed, 0, 0x3232)), bfloat162_of(0x43004300)));
  }
  __device__ __forceinline__ uint32_t low_codes(uint32_t v) const {
    return bits(__hmul2(__hsub2(bfloat162_of(take<0x000F000F, 0x43004300>(v)), bfloat162_of(low)), bfloat162_of(scale)));
  }
  __device__ __forceinline__ uint32_t high_codes(uint32_t v) const { return low_codes(v >> 4); }
};

// The fragment of one word: a[0] row g, a[1] row g + 8, columns 2t, 2t + 1; a[2], a[3] columns 2t + 8, 2t + 9.
template <typename T>
__device__ __forceinline__ void dequantize(uint32_t word, const RowScale<T>& upper, const RowScale<T>& lower, uint32_t (&a)[4]) {
  a[0] = upper.low_codes(word);
  a[1] = lower.high_codes(word);
  a[2] = upper.low_codes(word >> 8);
  a[3] = lower.high_codes(word >> 8);
}

}  // namespace dandan_w4a16
