// Computes   out[m, n] = round(sum over slices of partials[slice][m][n] + bias): the second half of a product whose K was split over blocks.
// Tile       a thread adds four neighbouring columns, or one where rows cannot be read and written so.
// Bound      bytes: slices * m * n * 4 read (mostly from L2, where they were just written), m * n * 2 written.
// Additions  slices in rising order, then bias, then one rounding: the same bits on every run.
//
// In a namespace of its own for each source file: files are compiled for different architectures, and a kernel that several of them define would be
// looked up in the code of one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <dandan/ptx/pdl.cuh>
#include <dandan/tile/vector.cuh>

namespace dandan::tile {
namespace {

inline constexpr int kSplitSumThreads = 256;

struct SplitSum {
  const float* partials;
  const void* bias;  // [n] or nothing
  void* out;
  int64_t out_stride, m, n;
  int slices;

  // Whether rows can be read and written by fours, and the blocks of split_sum_kernel<T, 4 or 1> that this takes.
  bool by_fours() const { return n % 4 == 0 && reinterpret_cast<uintptr_t>(out) % 8 == 0 && (out_stride % 4 == 0 || m == 1); }
  int64_t blocks() const { return (m * (by_fours() ? n / 4 : n) + kSplitSumThreads - 1) / kSplitSumThreads; }
};

template <typename T, int kColumns>
__global__ void __launch_bounds__(kSplitSumThreads) split_sum_kernel(const __grid_constant__ SplitSum p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t units_of_row = p.n / kColumns, units = p.m * units_of_row;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kSplitSumThreads + threadIdx.x;
  if (unit >= units) return;
  const int64_t row = units <= 0xffffffff ? static_cast<uint32_t>(unit) / static_cast<uint32_t>(units_of_row) : unit / units_of_row;
  const int64_t column = (unit - row * units_of_row) * kColumns;
  const float* from = p.partials + row * p.n + column;
  float sum[kColumns] = {};
#pragma unroll 4
  for (int s = 0; s < p.slices; ++s, from += p.m * p.n) {
    if constexpr (kColumns == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    } else {
      sum[0] += *from;
    }
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int e = 0; e < kColumns; ++e) sum[e] += to_float(static_cast<const T*>(p.bias)[column + e]);
  }
  T* const to = static_cast<T*>(p.out) + row * p.out_stride + column;
  if constexpr (kColumns == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair(sum[0], sum[1], T{}), pack_pair(sum[2], sum[3], T{}));
  } else {
    *to = from_float<T>(sum[0]);
  }
}

}  // namespace
}  // namespace dandan::tile
