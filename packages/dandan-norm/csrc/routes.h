// Which kernel a call takes: a pure function of architecture, dtype, shape and layout. No torch, no CUDA; runs without a GPU.
//
// Order of `auto`: a profile row, the table below where the architecture was measured, torch otherwise. `cuda` is the table below, a kernel's name
// that kernel alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "norm.h"

namespace dandan_norm {

enum class Op : int { kRmsNorm = 0, kResidualRmsNorm, kLayerNorm, kSoftmax, kSiluAndMul, kArgmax };
inline constexpr const char* kOpNames[] = {"rms_norm", "residual_rms_norm", "layer_norm", "softmax", "silu_and_mul", "argmax"};
inline constexpr int kOpCount = 6;

// The numbers are those of the `backend` argument of the operators.
enum class Backend : int { kAuto = 0, kTorch = 1, kCuda = 2, kRow = 3, kStream = 4, kCluster = 5, kElementwise = 6 };
inline constexpr const char* kBackendNames[] = {"auto", "torch", "cuda", "sm80_row", "sm80_stream", "sm90_cluster", "sm80_elementwise"};
inline constexpr int kBackendCount = 7;

inline constexpr int kMeasuredArchitectures[] = {90};

struct Problem {
  Op op = Op::kRmsNorm;
  int arch = 0;           // of the device
  int code_arch = 0;      // of the code in this library that the device runs; 0: none
  int sm_count = 0;
  DType dtype = DType::kHalf;
  int64_t rows = 0, cols = 0;
  bool aligned = false;   // every row of every tensor is whole 16-byte vectors at multiples of 16 bytes, two levels, 32-bit strides
  bool affine = true;     // weight and bias, if any, are contiguous, aligned and of x's dtype
  bool levels = true;     // leading dimensions merge into at most dandan::kMaxRowLevels
  Backend backend = Backend::kAuto;
  Backend profile = Backend::kAuto;  // kernel that a profile row names for this call; kAuto: none
};

struct Route {
  Backend kernel = Backend::kTorch;
  Tile tile;
  const char* reason = "";
  const char* fallback = "";  // why not an own kernel, when auto takes torch
  bool profile = false;
  std::string error;          // not empty: an explicit choice that cannot run, and what would
};

inline int64_t vectors_of(const Problem& p) {
  const int per_vector = 16 / dtype_size(p.dtype);
  return (p.cols + per_vector - 1) / per_vector;
}

inline int round_up(int64_t value, int step) { return static_cast<int>((value + step - 1) / step * step); }

// Threads for `lanes` lanes of work: a power of two below 32, else a multiple of 32.
inline int threads_for(int64_t lanes) {
  if (lanes >= 32) return round_up(lanes, 32);
  int threads = 1;
  while (threads < lanes) threads *= 2;
  return threads;
}

inline constexpr int64_t kRowMaxVectors = 4096;       // 8 vectors for each of 512 threads
inline constexpr int64_t kClusterMaxVectors = 65536;  // of each of 16 blocks

// Rows that share a block: enough for 128 threads. One wide row a block starts sooner when there are few of them.
inline int rows_per_block(int threads, int64_t rows) {
  if (threads >= 128) return 1;
  if (threads > 32 && rows < 1024) return 1;
  return 128 / threads;
}

// Lanes of a row of up to 1536 vectors, two vectors each: a function of the width, and so is the order of additions. Above 256 vectors, and between 65 and
// 128, they are a multiple of 64, so that half as many threads can stand for two lanes each. Not where layer_norm folds its rows.
inline int pair_lanes(int64_t vectors) {
  const int64_t lanes = (vectors + 1) / 2;
  return vectors > 256 ? round_up(lanes, 64) : threads_for(lanes);
}

inline constexpr int64_t kPairMaxVectors = 1536;
inline constexpr int64_t kFewRows = 512;

// Where layer_norm folds a row onto 32 lanes: a function of width and dtype.
inline bool folds(const Problem& p) {
  return p.op == Op::kLayerNorm && vectors_of(p) > 32 && vectors_of(p) <= (p.dtype == DType::kFloat ? 1024 : 512);
}

// Vectors of each lane of a folded row, as a power of two.
inline int folded_slots(int64_t vectors) {
  int slots = 2;
  while (slots * 32 < vectors) slots *= 2;
  return slots;
}

// fp16 on an H200 (2026-12): few rows end sooner with one or two vectors a thread, many with four, but for rows of 2048. The sums of fp32 cross the warps in
// fp64, so wide rows of fp32 have four, and fewer warps, whatever their number.
inline Tile folded_tile(const Problem& p) {
  const int slots = folded_slots(vectors_of(p));
  const bool exact = p.dtype == DType::kFloat, few = p.rows <= kFewRows;
  Tile tile;
  tile.folded = true;
  const auto cut = [&](int vectors) {
    tile.vectors = vectors;
    tile.threads = 32 * slots / vectors;
    tile.rows = tile.threads == 32 ? 4 : 1;
  };
  const auto wave = [&](int registers) { return int64_t{p.sm_count} * (65536 / (registers * tile.threads * tile.rows)) * tile.rows; };
  if (slots == 2) {
    cut(2);
  } else if (slots == 4) {
    cut(few && !exact ? 1 : 2);
    if (p.rows > wave(64)) cut(4);
  } else if (slots == 8) {
    cut(exact ? 4 : 2);
  } else {
    cut(few && !exact ? 2 : 4);
  }
  // With no registers for weight and bias, these rows are one wave of blocks and not two; where a quarter of the slots is empty, more blocks pay as well.
  if (slots == 16 && !exact && !few && vectors_of(p) <= 384) tile.keep = 2;
  if (tile.vectors == 4 && (slots == 4 || !exact) && p.rows > wave(exact || slots == 4 ? 80 : 88) && p.rows <= wave(56)) tile.keep = 2;
  return tile;
}

// Measured on an H200 (2026-12): few rows of a norm end sooner with more threads, many run better with two lanes a thread. Softmax keeps four vectors
// for each lane whatever the number of rows.
inline Tile row_tile(const Problem& p) {
  if (folds(p)) return folded_tile(p);
  const int64_t vectors = vectors_of(p);
  const bool few = p.rows <= kFewRows;
  Tile tile;
  if (p.op == Op::kArgmax) {
    tile.vectors = vectors > 1024 ? 8 : 4;
    tile.threads = threads_for(std::min<int64_t>((vectors + tile.vectors - 1) / tile.vectors, 512));
  } else if (vectors > kPairMaxVectors) {
    tile.vectors = 8;
    tile.threads = threads_for((vectors + 7) / 8);
    tile.keep = 2;
  } else {
    const int lanes = pair_lanes(vectors);
    const bool two = p.op == Op::kSoftmax ? lanes == 64 || vectors > 256 : vectors > (few ? 768 : 256);
    tile.vectors = two ? 4 : 2;
    tile.threads = two ? lanes / 2 : lanes;
    tile.keep = few ? 1 : 0;
    if (two && !few && p.op == Op::kLayerNorm) tile.keep = tile.threads < 256 ? 1 : 2;
    // With 48 registers a thread instead of 64, these rows are one wave of blocks and not two.
    const auto wave = [&](int registers) { return int64_t{p.sm_count} * (65536 / (registers * tile.threads)); };
    if (two && !few && p.op == Op::kResidualRmsNorm && p.rows > wave(64) && p.rows <= wave(48)) tile.keep = 2;
  }
  tile.rows = rows_per_block(tile.threads, p.rows);
  return tile;
}

// Softmax and norms: by width alone. Argmax has no order of additions, so few rows get large clusters.
inline Tile cluster_tile(const Problem& p) {
  const int64_t vectors = vectors_of(p);
  Tile tile;
  tile.vectors = 8;
  if (p.op == Op::kArgmax) {
    tile.cluster = p.rows * 8 <= 4 * p.sm_count ? 8 : 2;
    const int passes = p.rows * tile.cluster <= p.sm_count ? 1 : 2;  // one where a multiprocessor has one block, two where several share it
    const int64_t lanes = int64_t{8} * tile.cluster * passes;
    tile.threads = std::min(threads_for((vectors + lanes - 1) / lanes), 512);
    return tile;
  }
  tile.cluster = vectors <= 8192 ? 4 : vectors <= 32768 ? 8 : 16;
  tile.keep = 2;
  tile.threads = static_cast<int>(std::min<int64_t>(round_up((vectors + tile.vectors * tile.cluster - 1) / (tile.vectors * tile.cluster), 32), 512));
  return tile;
}

// The lanes of the kernel that the same width takes when it is aligned, one a thread, so that both add in the same order. A folded row has any number of
// warps up to kStreamFoldWarps of sm80_stream.cuh.
inline Tile stream_tile(const Problem& p) {
  const int64_t vectors = vectors_of(p);
  Tile tile = p.op == Op::kArgmax || vectors <= kRowMaxVectors ? row_tile(p) : cluster_tile(p);
  if (folds(p)) {
    tile.threads = std::min(16 * folded_slots(vectors), 256);
    tile.rows = rows_per_block(tile.threads, p.rows);
  } else if (p.op != Op::kArgmax && p.op != Op::kSoftmax && vectors <= kPairMaxVectors) {
    tile.threads = pair_lanes(vectors);
    tile.rows = rows_per_block(tile.threads, p.rows);
  }
  tile.vectors = 0;
  tile.keep = 0;
  return tile;
}

inline Tile elementwise_tile(const Problem& p) {
  const int64_t units = p.aligned ? vectors_of(p) : p.cols;
  const int64_t wide = p.aligned && p.rows * units >= 500000 ? 512 : 128;
  Tile tile;
  tile.vectors = 1;
  tile.threads = static_cast<int>(std::min(units >= 32 ? round_up(units, 32) : std::max<int64_t>(units, 1), wide));
  tile.rows = std::max(1, 128 / tile.threads);
  return tile;
}

// Why `kernel` cannot take the call, or nullptr.
inline const char* obstacle(Backend kernel, const Problem& p) {
  const bool elementwise = p.op == Op::kSiluAndMul;
  if ((kernel == Backend::kElementwise) != elementwise) return "it does not compute this operator";
  if (p.code_arch == 0) return "this build has no code for the device's architecture";
  if (p.code_arch < 80) return "it needs sm_80 or later";
  if (!p.levels) return "the leading dimensions do not merge into four";
  if (p.cols > 0x7fff0000) return "rows have more than 2^31 - 2^16 columns";
  if (kernel == Backend::kStream || kernel == Backend::kElementwise) return nullptr;
  if (!p.aligned) return "rows are not whole 16-byte vectors at multiples of 16 bytes";
  if (!p.affine) return "weight or bias is not contiguous, aligned and of x's dtype";
  if (kernel == Backend::kRow) {
    if (p.op != Op::kArgmax && vectors_of(p) > kRowMaxVectors) return "rows are wider than 65536 bytes";
    return nullptr;
  }
  if (p.code_arch < 90) return "clusters need sm_90 or later";
  if (p.op != Op::kArgmax && vectors_of(p) > kClusterMaxVectors) return "rows are wider than 1 MiB";
  if (p.rows > 0x7fffffff / 16) return "there are too many rows for one grid of clusters";
  return nullptr;
}

// The best own kernel, or kTorch when none can run.
inline Backend best_kernel(const Problem& p) {
  if (p.op == Op::kSiluAndMul) return obstacle(Backend::kElementwise, p) == nullptr ? Backend::kElementwise : Backend::kTorch;
  const bool wide = vectors_of(p) > kRowMaxVectors && (p.op != Op::kArgmax || p.rows <= p.sm_count);
  if (wide && obstacle(Backend::kCluster, p) == nullptr) return Backend::kCluster;
  if (obstacle(Backend::kRow, p) == nullptr) return Backend::kRow;
  return obstacle(Backend::kStream, p) == nullptr ? Backend::kStream : Backend::kTorch;
}

inline const char* kernel_reason(Backend kernel) {
  switch (kernel) {
    case Backend::kRow: return "aligned rows that fit the registers of a block";
    case Backend::kCluster: return "aligned wide rows, one cluster of blocks each";
    case Backend::kStream: return "rows too wide, not aligned, or with a weight of another dtype";
    case Backend::kElementwise: return "element by element";
    default: return "";
  }
}

inline Tile tile_of(Backend kernel, const Problem& p) {
  switch (kernel) {
    case Backend::kRow: return row_tile(p);
    case Backend::kStream: return stream_tile(p);
    case Backend::kCluster: return cluster_tile(p);
    default: return elementwise_tile(p);
  }
}

inline Route select(const Problem& p) {
  Route route;
  const Backend best = best_kernel(p);
  if (p.backend == Backend::kTorch) {
    route.reason = "asked for";
    return route;
  }
  if (p.backend == Backend::kAuto) {
    const bool measured = std::find(std::begin(kMeasuredArchitectures), std::end(kMeasuredArchitectures), p.arch) != std::end(kMeasuredArchitectures);
    if (p.profile != Backend::kAuto && (p.profile == Backend::kTorch || obstacle(p.profile, p) == nullptr)) {
      route.kernel = p.profile;
      route.reason = "a profile row names it";
      route.profile = true;
      if (route.kernel == Backend::kTorch) return route;
    } else if (best == Backend::kTorch) {
      route.reason = "no own kernel can take the call";
      route.fallback = obstacle(p.op == Op::kSiluAndMul ? Backend::kElementwise : Backend::kStream, p);
      return route;
    } else if (!measured) {
      route.reason = "the kernels were never measured on this architecture";
      route.fallback = "architecture never measured; name backend=\"cuda\" to take the own kernel";
      return route;
    } else {
      route.kernel = best;
      route.reason = kernel_reason(best);
    }
  } else {
    route.kernel = p.backend == Backend::kCuda ? best : p.backend;
    route.reason = p.backend == Backend::kCuda ? kernel_reason(best) : "asked for";
    const Backend judged = best == Backend::kTorch && p.backend == Backend::kCuda
                               ? (p.op == Op::kSiluAndMul ? Backend::kElementwise : Backend::kStream)
                               : route.kernel;
    if (const char* why = obstacle(judged, p)) {
      route.error = std::string(kOpNames[static_cast<int>(p.op)]) + ": backend \"" + kBackendNames[static_cast<int>(p.backend)] +
                    "\" cannot run: " + why + "; \"auto\" and \"torch\" can";
      if (best != Backend::kTorch) route.error += std::string(", and so can \"") + kBackendNames[static_cast<int>(best)] + "\"";
      return route;
    }
  }
  route.tile = tile_of(route.kernel, p);
  return route;
}

}  // namespace dandan_norm
