// What the bindings hand to the launcher of paged decode: no torch, no kernels. Not built yet: no operator calls it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention.h"

namespace dandan_attention {

// In elements; the last dimension is contiguous.
struct PageStrides {
  int64_t page = 0, slot = 0, head = 0;
};

// Key j of sequence b lies in page page_table[b, j / page_size] at slot j % page_size. Query t of seqlen_q stands at key live - seqlen_q + t and sees
// the keys up to its own, with a window (> 0) only the last `window` of them; logits as in attention.h. A row without a visible key is exactly 0, its
// lse -inf. Keys and values beyond the live length, and those of a page id outside of [0, num_pages), do not reach the result, NaN included.
struct DecodeParams {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* out = nullptr;
  float* lse = nullptr;  // [batch, num_heads_q, seqlen_q], or nothing
  Strides q_strides, out_strides;
  PageStrides k_strides, v_strides;

  const int32_t* page_table = nullptr;  // [batch, max_pages], rows table_stride apart
  int64_t table_stride = 0, max_pages = 0, num_pages = 0;
  int page_size = 0;
  const int32_t* seqused_k = nullptr;  // [batch]; a value above max_pages * page_size counts as that, below 0 as 0

  int64_t batch = 0;
  int seqlen_q = 1, num_heads_q = 0, num_heads_kv = 0, head_dim = 0;
  float softmax_scale = 1.f, softcap = 0.f;  // softcap 0: none
  int64_t window = 0;                        // 0: none

  // 0: the keys of all sequences are divided evenly over the blocks that run at a time. N > 0: the keys of each sequence into N parts, whatever the other
  // sequences are: a sequence has the same bits in every batch.
  int num_splits = 0;
  void* workspace = nullptr;  // decode_workspace_bytes, at a multiple of 16
};

struct DecodeLaunch {
  cudaStream_t stream = nullptr;
  int sm_count = 0;
  bool dependent = false;  // programmatic dependent launch behind the kernel before
  bool chained = false;    // the same between the two kernels of a call: where the architecture has it (9.0)
  int config = 0;          // a place in decode_configs.h
};

// Depends on shapes and the number of multiprocessors alone, not on lengths nor on the width of the table.
int64_t decode_workspace_bytes(const DecodeParams& params, const DecodeLaunch& launch);

// Starts and strides of q, k and v at multiples of 16 bytes, those of out anywhere; head_dim 64, 128 or 256.
void launch_sm80_decode(DType dtype, const DecodeParams& params, const DecodeLaunch& launch);

}  // namespace dandan_attention
