// What the bindings hand to the launchers: no torch, no kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dandan_attention {

enum class DType : int { kHalf = 0, kBFloat16 = 1 };

inline constexpr const char* dtype_name(DType t) { return t == DType::kHalf ? "float16" : "bfloat16"; }

// In elements. The last dimension is contiguous. Packed tensors [total, heads, head_dim] have no batch stride.
struct Strides {
  int64_t batch = 0, head = 0, row = 0;
};

// out[b, h, i] = sum over visible j of softmax_j(logit[i, j]) * v[b, h / (num_heads_q / num_heads_kv), j]
//   logit = scale * q.k, or softcap * tanh(scale * q.k / softcap)
//   j visible to i: j < live length, j <= start + i (causal), j > start + i - window (window > 0)
// A row without a visible key is exactly 0, its lse -inf. Keys and values beyond the live length do not reach the result, NaN included.
struct Params {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;
  float* lse = nullptr;  // natural logarithm of the sum of exponentials, or nothing; [batch, num_heads_q, seqlen_q], packed: [num_heads_q, total_q]
  Strides q_strides, k_strides, v_strides, out_strides;

  const int32_t* cu_seqlens_q = nullptr;  // [batch + 1]: packed; nothing: dense
  const int32_t* cu_seqlens_k = nullptr;
  const int32_t* seqused_k = nullptr;     // [batch] live lengths of the keys, or nothing; a value above the length counts as the length, below 0 as 0
  const int32_t* query_starts = nullptr;  // [batch], or nothing: query_start holds for all
  int64_t query_start = 0;
  bool suffix = false;                    // start = live length of the keys - length of the queries, sequence by sequence

  int64_t batch = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  // dense: of every sequence; packed: the longest
  int64_t total_q = 0, total_k = 0;    // packed: rows of q and out, of k and v
  int num_heads_q = 0, num_heads_kv = 0, head_dim = 0;
  float softmax_scale = 1.f, softcap = 0.f;  // softcap 0: none
  bool causal = false;
  int64_t window = 0;                  // 0: none
};

struct Launch {
  cudaStream_t stream = nullptr;
  int sm_count = 0;
  bool dependent = false;  // programmatic dependent launch
  int config = 0;          // a place in configs.h
};

// Starts and strides of q, k and v at multiples of 16 bytes, those of out anywhere; head_dim 64, 128 or 256.
void launch_sm80_mma(DType dtype, const Params& params, const Launch& launch);
// Starts and strides of q, k, v and out at multiples of 16 bytes, rows of q, k and v not one row again and again; head_dim 64, 128 or 256.
void launch_sm90a_wgmma(DType dtype, const Params& params, const Launch& launch);

}  // namespace dandan_attention
