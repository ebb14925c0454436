// What the bindings hand to the launchers: no torch, no kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace dandan_gemm {

enum class DType : int { kHalf = 0, kBFloat16 = 1 };

inline constexpr int kElementSize = 2;
inline constexpr const char* dtype_name(DType t) { return t == DType::kHalf ? "float16" : "bfloat16"; }

// out[i, j] = round(sum over l of a[i, l] * b(l, j) + bias[j]), sums in fp32. Strides in elements; the other dimension is contiguous.
struct Params {
  const void* a = nullptr;     // [m, k]
  const void* b = nullptr;     // [n, k] when `weight_transposed`, else [k, n]
  const void* bias = nullptr;  // [n], contiguous, or nothing
  void* out = nullptr;         // [m, n]
  int64_t a_stride = 0, b_stride = 0, out_stride = 0;  // between rows
  int64_t m = 0, n = 0, k = 0;                         // all above 0
  bool weight_transposed = false;
};

// How a kernel cuts the problem: one of its named configurations, and the number of slices of K whose sums are added at the end.
struct Tile {
  int config = 0;
  int split = 1;
};

struct Launch {
  cudaStream_t stream = nullptr;
  int sm_count = 0;
  bool dependent = false;      // programmatic dependent launch
  bool static_weight = false;  // b may be read before the kernels enqueued earlier have ended
  Tile tile;
  void* workspace = nullptr;   // of workspace_bytes(), not initialised
};

// Any sizes, strides and addresses.
void launch_sm80_mma(DType dtype, const Params& params, const Launch& launch);
// Rows of a and b at multiples of 16 bytes.
void launch_sm90_tma_mma(DType dtype, const Params& params, const Launch& launch);
void launch_sm90a_wgmma(DType dtype, const Params& params, const Launch& launch);
// Few rows of a; rows of a and b at multiples of 16 bytes, k a multiple of 8.
void launch_skinny(DType dtype, const Params& params, const Launch& launch);

}  // namespace dandan_gemm
