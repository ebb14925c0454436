// What the bindings hand to the launchers: no torch, no kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include <dandan/tile/row_space.h>

namespace dandan_norm {

enum class DType : int { kHalf = 0, kBFloat16 = 1, kFloat = 2 };

inline constexpr int dtype_size(DType t) { return t == DType::kFloat ? 4 : 2; }
inline constexpr const char* dtype_name(DType t) {
  return t == DType::kHalf ? "float16" : t == DType::kBFloat16 ? "bfloat16" : "float32";
}

// One activation tensor over the call's RowSpace.
struct Rows {
  void* data = nullptr;
  dandan::RowStrides strides;
};

// A vector of [cols], elements `stride` apart, or nothing.
struct Affine {
  const void* data = nullptr;
  DType dtype = DType::kFloat;
  int64_t stride = 1;
};

// The operands of one call. Which are present depends on the operator:
//   rms_norm x, out, weight | residual_rms_norm x, other (the residual), out, second (the sum), weight | layer_norm x, out, weight, bias
//   softmax x, out | silu_and_mul x (the gate), other (up), out | argmax x, out (int64, one element a row)
struct Params {
  Rows x, other, out, second;
  Affine weight, bias;
  dandan::RowSpace space;
  int64_t cols = 0;
  float eps = 0.f;
};

// How a row is cut. `threads` threads of each of `cluster` blocks share a row, lane t of them all holds the 16-byte vectors t, t + lanes, ...; this
// decides the order of additions and is a function of width and dtype alone (with four vectors a thread is two lanes; a folded row has 32 lanes whatever
// the threads). `rows` rows share a block, which changes nothing but speed.
// sm80_stream runs one block a row and adds as if it were `cluster` blocks.
struct Tile {
  int vectors = 0;  // vectors a thread keeps in registers; 0: any number, read again for each pass
  int threads = 0;
  int rows = 1;
  int cluster = 1;
  int keep = 0;  // where weight and bias wait: Keep of rows.cuh; speed alone
  bool folded = false;  // the row is folded onto one warp: fold_warps of common.cuh
};

struct Launch {
  cudaStream_t stream = nullptr;
  bool dependent = false;   // programmatic dependent launch
  bool vectorized = false;  // every row of every operand starts at a multiple of 16 bytes and is made of whole vectors
  Tile tile;
};

// sm80_row: vectorized operands, weight and bias of x's dtype, contiguous argmax output. sm90_cluster: the same, a cluster of blocks a row.
void launch_sm80_row_rms(DType dtype, const Params& params, const Launch& launch);
void launch_sm80_row_layer_norm(DType dtype, const Params& params, const Launch& launch);
void launch_sm80_row_softmax(DType dtype, const Params& params, const Launch& launch);
void launch_sm80_row_argmax(DType dtype, const Params& params, const Launch& launch);
void launch_sm90_cluster_rms(DType dtype, const Params& params, const Launch& launch);
void launch_sm90_cluster_layer_norm(DType dtype, const Params& params, const Launch& launch);
void launch_sm90_cluster_softmax(DType dtype, const Params& params, const Launch& launch);
void launch_sm90_cluster_argmax(DType dtype, const Params& params, const Launch& launch);

// sm80_stream: anything.
void launch_sm80_stream_rms(DType dtype, const Params& params, const Launch& launch);
void launch_sm80_stream_layer_norm(DType dtype, const Params& params, const Launch& launch);
void launch_sm80_stream_softmax(DType dtype, const Params& params, const Launch& launch);
void launch_sm80_stream_argmax(DType dtype, const Params& params, const Launch& launch);

// sm80_elementwise: anything.
void launch_sm80_elementwise(DType dtype, const Params& params, const Launch& launch);

}  // namespace dandan_norm
