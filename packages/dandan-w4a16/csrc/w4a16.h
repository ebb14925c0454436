// What the bindings hand to the launchers, and the kernel-ordered weight: no torch, no kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dandan_w4a16 {

enum class DType : int { kHalf = 0, kBFloat16 = 1 };

inline constexpr const char* dtype_name(DType t) { return t == DType::kHalf ? "float16" : "bfloat16"; }

// ---------------------------------------------------------------- the kernel-ordered weight
//
// A fragment is 16 rows (of n) by 16 columns (of k) as the tensor cores take it: lane 4g + t of a warp holds rows g and g + 8, columns 2t, 2t + 1,
// 2t + 8, 2t + 9. Its eight codes are one 32-bit word, so that a mask and shifts by 4 give pairs of neighbours in k:
//
//   bits   31..28  27..24  23..20  19..16  15..12  11..8   7..4    3..0
//   row    g+8     g       g+8     g       g+8     g       g+8     g
//   col    2t+9    2t+9    2t+1    2t+1    2t+8    2t+8    2t      2t
//
// codes   [n/64][k/64][4 (16 rows each)][32 lanes][4 (16 columns each)] words: a lane reads the 16 bytes of 64 columns at once, a warp 512 contiguous
// scales  [n/64][k/group][4][8 (g)][2 (rows g, g + 8)] of {scale, zero point}, both of the activations' dtype: 8 bytes for a lane
//
// n and k are padded to multiples of 64: rows and groups that do not exist have scale 0, zero point 0 and codes 0; columns that do not exist in a group
// that does have its zero point as code. So everything that is padded is a weight of exactly 0.
inline constexpr int kBlock = 64;
inline constexpr int64_t padded(int64_t size) { return (size + kBlock - 1) / kBlock * kBlock; }
inline constexpr int64_t code_words(int64_t n, int64_t k) { return padded(n) * padded(k) / 8; }
inline constexpr int64_t groups_of(int64_t k, int group) { return (padded(k) + group - 1) / group; }
inline constexpr int64_t scale_words(int64_t n, int64_t k, int group) { return padded(n) * groups_of(k, group); }

// A weight in both orders, for the kernels that turn one into the other. The canonical tensors are contiguous.
struct Weight {
  int32_t* qweight = nullptr;  // [n, k/8], low nibble first along k
  void* scales = nullptr;      // [n, ceil(k/group)] of the activations' dtype
  uint8_t* zeros = nullptr;    // [n, ceil(k/group)]
  uint32_t* codes = nullptr;        // code_words(n, k)
  uint32_t* scale_words = nullptr;  // scale_words(n, k, group)
  int64_t n = 0, k = 0;             // k is a multiple of 8
  int group = 64;
};

// out[i, j] = round(sum over l of x[i, l] * w[j, l] + bias[j]), w[j, l] = round(float(q[j, l] - z[j, l / group]) * float(s[j, l / group])), sums in fp32.
// Strides in elements between rows of x and out; columns are contiguous.
struct Params {
  const void* x = nullptr;         // [m, k]; rows at multiples of 16 bytes
  const uint32_t* codes = nullptr;
  const uint32_t* scales = nullptr;
  const void* bias = nullptr;      // [n] or nothing
  void* out = nullptr;             // [m, n]
  int64_t x_stride = 0, out_stride = 0;
  int64_t m = 0, n = 0, k = 0;
  int group = 64;                  // 32, 64 or 128
};

struct Tile {
  int config = 0;
  int split = 1;  // slices of K
};

struct Launch {
  cudaStream_t stream = nullptr;
  int sm_count = 0;
  bool dependent = false;  // programmatic dependent launch; the weight is always static: see finalize()
  Tile tile;
  void* workspace = nullptr;  // sm80_mma with several slices of K: mma_workspace_bytes(), not initialised
};

// The fp32 sums of each slice.
inline constexpr int64_t mma_workspace_bytes(int64_t m, int64_t n, int split) { return split > 1 ? 4 * split * m * n : 0; }

// Up to 64 rows of x.
void launch_sm90_decode(DType dtype, const Params& params, const Launch& launch);
// Up to 16.
void launch_sm80_decode(DType dtype, const Params& params, const Launch& launch);
// More.
void launch_sm90a_wgmma(DType dtype, const Params& params, const Launch& launch);
// Any number of rows, without wgmma.
void launch_sm80_mma(DType dtype, const Params& params, const Launch& launch);
// Rows first .. first + count - 1 of w itself, [count, k] from a multiple of 16 bytes; of params codes, scales, n, k and group are read.
void launch_sm80_dequantize(DType dtype, const Params& params, int64_t first, int64_t count, void* out, const Launch& launch);
// codes and scale_words from qweight, scales and zeros, and back, bit for bit. Every word of the results is written.
void launch_sm80_repack(DType dtype, const Weight& weight, cudaStream_t stream);
void launch_sm80_unpack(DType dtype, const Weight& weight, cudaStream_t stream);

}  // namespace dandan_w4a16
