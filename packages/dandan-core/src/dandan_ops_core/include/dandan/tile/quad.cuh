// Exchanges between the four lanes of a quad, which have a row of a tensor core's fragment together.
#pragma once

#include <cstdint>

namespace dandan::tile {

// Transposes 4x4 words: word i of lane j becomes word j of lane i. All lanes of the warp take part.
__device__ __forceinline__ void transpose_quad_words(uint32_t (&w)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, upper = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // 2x2 blocks, within themselves
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // and among one another
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = other;
  }
}

}  // namespace dandan::tile
