// Canonical weight to kernel-ordered weight and back, on the host, element by element: what sm80_repack does, written from the picture in w4a16.h and
// sharing nothing with the kernels but the sizes. No CUDA.
#pragma once

#include <cstdint>
#include <cstring>

#include "w4a16.h"

namespace dandan_w4a16 {

// Where code (row, column) lies: its word, and the lowest of its four bits.
struct CodePlace {
  int64_t word;
  int bit;
};

inline CodePlace code_place(int64_t row, int64_t column, int64_t k) {
  const int64_t block_n = row / 64, block_k = column / 64, blocks_k = padded(k) / 64;
  const int r = static_cast<int>(row % 16), c = static_cast<int>(column % 16);
  const int lane = r % 8 * 4 + c % 8 / 2;
  // Nibble of the word: rows alternate, then the halves of the 16 columns; the neighbour in k is 16 bits up.
  const int nibble = r / 8 + c / 8 * 2 + c % 2 * 4;
  const int64_t fragment_row = row % 64 / 16, fragment_column = column % 64 / 16;
  return {(((block_n * blocks_k + block_k) * 4 + fragment_row) * 32 + lane) * 4 + fragment_column, 4 * nibble};
}

inline int64_t scale_place(int64_t row, int64_t group_index, int64_t k, int group) {
  return (((row / 64 * groups_of(k, group) + group_index) * 4 + row % 64 / 16) * 8 + row % 8) * 2 + row % 16 / 8;
}

// 0..15 in the 16 bits of a dtype, and back.
inline uint16_t small_integer_bits(int value, DType dtype) {
  const float f = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (dtype == DType::kBFloat16) return static_cast<uint16_t>(bits >> 16);
  return value == 0 ? 0 : static_cast<uint16_t>(((bits >> 23) - 127 + 15) << 10 | (bits >> 13 & 0x3FF));
}

inline int small_integer(uint16_t bits, DType dtype) {
  for (int value = 0; value < 16; ++value) {
    if (small_integer_bits(value, dtype) == bits) return value;
  }
  return -1;
}

// weight.codes and weight.scale_words from the rest, all in host memory.
inline void pack_on_host(DType dtype, const Weight& weight) {
  const int64_t groups = (weight.k + weight.group - 1) / weight.group;
  std::memset(weight.codes, 0, code_words(weight.n, weight.k) * 4);
  std::memset(weight.scale_words, 0, scale_words(weight.n, weight.k, weight.group) * 4);
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      uint16_t scale;
      std::memcpy(&scale, static_cast<const uint16_t*>(weight.scales) + row * groups + g, 2);
      const uint32_t zero = small_integer_bits(weight.zeros[row * groups + g], dtype);
      weight.scale_words[scale_place(row, g, weight.k, weight.group)] = scale | zero << 16;
    }
    for (int64_t column = 0; column < padded(weight.k) && column / weight.group < groups; ++column) {
      uint32_t code = weight.zeros[row * groups + column / weight.group];
      if (column < weight.k) code = static_cast<uint32_t>(weight.qweight[row * (weight.k / 8) + column / 8]) >> (4 * (column % 8)) & 15;
      const CodePlace place = code_place(row, column, weight.k);
      weight.codes[place.word] |= code << place.bit;
    }
  }
}

// The other way.
inline void unpack_on_host(DType dtype, const Weight& weight) {
  const int64_t groups = (weight.k + weight.group - 1) / weight.group;
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint32_t word = weight.scale_words[scale_place(row, g, weight.k, weight.group)];
      static_cast<uint16_t*>(weight.scales)[row * groups + g] = static_cast<uint16_t>(word);
      weight.zeros[row * groups + g] = static_cast<uint8_t>(small_integer(static_cast<uint16_t>(word >> 16), dtype));
    }
    for (int64_t word = 0; word < weight.k / 8; ++word) {
      uint32_t codes = 0;
      for (int i = 0; i < 8; ++i) {
        const CodePlace place = code_place(row, word * 8 + i, weight.k);
        codes |= (weight.codes[place.word] >> place.bit & 15) << (4 * i);
      }
      weight.qweight[row * (weight.k / 8) + word] = static_cast<int32_t>(codes);
    }
  }
}

}  // namespace dandan_w4a16
