// What the bindings hand to the launcher of rope, write_kv and qk_norm_rope_write_kv: no torch, no kernels. Not built yet: no operator calls it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "decode.h"

namespace dandan_attention {

// In elements; the last dimension is contiguous.
struct TokenStrides {
  int64_t token = 0, head = 0;
};

// Of every token, each head of q and k: normalised (where there is a weight; rounded to the element type), then its first rotary_dim columns turned by the
// angles of the token's position (where there are tables; products and their sum in fp32, rounded once):
//   halves       x[c], x[c + rotary_dim / 2]     interleaved   x[2 c], x[2 c + 1]
//   -> a cos[c] - b sin[c], b cos[c] + a sin[c]
// and written to q_out and k_out (where they are) and, k and v as well, to their slot of the caches. A slot outside of the caches is skipped, a position
// outside of the tables counts as the nearest.
struct RopeWriteParams {
  const void *q = nullptr, *k = nullptr, *v = nullptr;  // q or v may be nothing
  void *q_out = nullptr, *k_out = nullptr;              // may be q and k themselves
  TokenStrides q_strides, k_strides, v_strides, q_out_strides, k_out_strides;

  const void *q_weight = nullptr, *k_weight = nullptr;  // [head_dim], both or neither
  float eps = 1e-6f;

  const void *cos = nullptr, *sin = nullptr;  // [max_positions, rotary_dim / 2] fp32, or nothing
  int64_t table_stride = 0, max_positions = 0;
  const void* positions = nullptr;            // [tokens]
  bool positions_are_64 = false, interleaved = false;
  int rotary_dim = 0;                         // a multiple of 16

  void *k_cache = nullptr, *v_cache = nullptr;  // [pages, page_size, num_heads_kv, head_dim], or nothing
  PageStrides k_cache_strides, v_cache_strides;
  const void* slot_mapping = nullptr;           // [tokens]: page * page_size + slot
  bool slots_are_64 = false;
  int64_t num_pages = 0;
  int page_size = 1;

  int64_t tokens = 0;
  int num_heads_q = 0, num_heads_kv = 0, head_dim = 0;  // head_dim 64, 128 or 256
};

// Starts and strides of all tensors at multiples of 16 bytes.
void launch_sm80_rope_write(DType dtype, const RopeWriteParams& params, const DecodeLaunch& launch);

}  // namespace dandan_attention
