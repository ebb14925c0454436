// Computes   the kernel-ordered weight from the canonical one, and back, bit for bit.
// Tile       one thread for each word written, of codes first, of scales and zero points behind them; 256 threads a block.
// Layout     w4a16.h. A word of codes is two rows, 8 apart, by columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16: one byte of four canonical words.
// Bound      bytes; runs when a weight is finalised or taken back, not in a forward pass.
// Requires   sm_80; k a multiple of 8; canonical tensors contiguous.
// Selected   finalize() and its reverse.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <dandan/ptx/pdl.cuh>

#include "w4a16.h"

namespace dandan_w4a16 {

struct RepackParams {
  Weight weight;
  int64_t blocks_k;      // of 64 k
  int64_t groups;        // of a row, canonical
  int64_t groups_k;      // of a row, padded
  int64_t code_threads;  // threads behind these have the scales
  int64_t threads;
};

// Bits of the kernel-ordered word of a scale and a zero point. An integer of four bits is exact in both types.
template <typename T>
__device__ __forceinline__ uint32_t scale_word(uint16_t scale, uint8_t zero) {
  const T z = static_cast<T>(static_cast<float>(zero));
  return scale | static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(&z)) << 16;
}

template <typename T>
__device__ __forceinline__ uint8_t zero_point(uint32_t word) {
  const uint16_t z = static_cast<uint16_t>(word >> 16);
  return static_cast<uint8_t>(static_cast<float>(*reinterpret_cast<const T*>(&z)));
}

template <typename T>
__global__ void __launch_bounds__(256) repack_kernel(const __grid_constant__ RepackParams p) {
  dandan::ptx::griddepcontrol_wait();
  const Weight& w = p.weight;
  int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= p.threads) return;
  if (i < p.code_threads) {
    // i = (((block of n * blocks_k + block of k) * 4 + 16 rows) * 32 + lane) * 4 + 16 columns
    const int64_t block = i / 512;
    const int lane = static_cast<int>(i / 4 % 32);
    const int64_t row = block / p.blocks_k * kBlock + i / 128 % 4 * 16 + lane / 4, column = block % p.blocks_k * kBlock + i % 4 * 16 + lane % 4 * 2;
    uint32_t word = 0;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      const int64_t r = row + half % 2 * 8, c = column + half / 2 * 8;  // and column c + 1: both in one canonical word and one group
      if (r >= w.n || c / w.group >= p.groups) continue;
      uint32_t pair = w.zeros[r * p.groups + c / w.group] * 0x11u;
      if (c < w.k) pair = static_cast<uint32_t>(w.qweight[r * (w.k / 8) + c / 8]) >> (c % 8 * 4) & 0xFF;
      word |= (pair & 15) << (4 * half) | (pair >> 4) << (4 * half + 16);
    }
    w.codes[i] = word;
  } else {
    // i = (((block of n * groups_k + group) * 4 + 16 rows) * 8 + g) * 2 + h: row 16 rows + g + 8h
    i -= p.code_threads;
    const int64_t r = i / 64 / p.groups_k * kBlock + i / 16 % 4 * 16 + i % 2 * 8 + i / 2 % 8, group = i / 64 % p.groups_k;
    const bool live = r < w.n && group < p.groups;
    const int64_t from = r * p.groups + group;
    w.scale_words[i] = live ? scale_word<T>(static_cast<const uint16_t*>(w.scales)[from], w.zeros[from]) : 0;
  }
}

template <typename T>
__global__ void __launch_bounds__(256) unpack_kernel(const __grid_constant__ RepackParams p) {
  dandan::ptx::griddepcontrol_wait();
  const Weight& w = p.weight;
  int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= p.threads) return;
  if (i < p.code_threads) {
    // i = row * k / 8 + word: the eight columns are pairs of four lanes, all with the same shift
    const int64_t words = w.k / 8, r = i / words, c = i % words * 8;
    const int64_t from = (((r / kBlock * p.blocks_k + c / kBlock) * 4 + r % kBlock / 16) * 32 + r % 8 * 4) * 4 + c % kBlock / 16;
    const int shift = static_cast<int>(r % 16 / 8 * 4 + c % 16 / 8 * 8);
    uint32_t word = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t codes = w.codes[from + 4 * t] >> shift;
      word |= ((codes & 15) | (codes >> 16 & 15) << 4) << (8 * t);
    }
    w.qweight[i] = static_cast<int32_t>(word);
  } else {
    i -= p.code_threads;
    const int64_t r = i / p.groups, group = i % p.groups;
    const uint32_t word = w.scale_words[(((r / kBlock * p.groups_k + group) * 4 + r % kBlock / 16) * 8 + r % 8) * 2 + r % 16 / 8];
    static_cast<uint16_t*>(w.scales)[i] = static_cast<uint16_t>(word);
    w.zeros[i] = zero_point<T>(word);
  }
}

}  // namespace dandan_w4a16
