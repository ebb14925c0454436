// Computes   out[m, n] = round(sum over slices of partials[slice][m][n] + bias): the second half of a product whose K was split over blocks.
// Tile       a thread adds four neighbouring columns, or one where rows cannot be read and written so.
// Bound      bytes: split * m * n * 4 read (mostly from L2, where the slices were just written), m * n * 2 written.
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

#include "gemm.h"
#include "launch.h"

namespace dandan_gemm {
namespace {

struct SplitReduceParams {
  const float* partials;
  const void* bias;
  void* out;
  int64_t out_stride, m, n;
  int split;
};

inline constexpr int kSplitReduceThreads = 256;

template <typename T, int kColumns>
__global__ void __launch_bounds__(kSplitReduceThreads) split_reduce_kernel(const SplitReduceParams p) {
  dandan::ptx::griddepcontrol_launch_dependents();
  dandan::ptx::griddepcontrol_wait();
  const int64_t units_of_row = p.n / kColumns, units = p.m * units_of_row;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kSplitReduceThreads + threadIdx.x;
  if (unit >= units) return;
  const int64_t row = units <= 0xffffffff ? static_cast<uint32_t>(unit) / static_cast<uint32_t>(units_of_row) : unit / units_of_row;
  const int64_t column = (unit - row * units_of_row) * kColumns;
  const int64_t slice = p.m * p.n;
  const float* from = p.partials + row * p.n + column;
  T* const to = static_cast<T*>(p.out) + row * p.out_stride + column;
  float sum[kColumns] = {};
#pragma unroll 4
  for (int s = 0; s < p.split; ++s, from += slice) {
    if constexpr (kColumns == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    } else {
      sum[0] += *from;
    }
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int e = 0; e < kColumns; ++e) sum[e] += dandan::tile::to_float(static_cast<const T*>(p.bias)[column + e]);
  }
  if constexpr (kColumns == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(dandan::tile::pack_pair(sum[0], sum[1], T{}), dandan::tile::pack_pair(sum[2], sum[3], T{}));
  } else {
    *to = dandan::tile::from_float<T>(sum[0]);
  }
}

// Adds the slices in launch.workspace, behind the kernel that writes them.
template <typename T>
void launch_split_reduce(const Params& params, const Launch& launch) {
  const SplitReduceParams p = {static_cast<const float*>(launch.workspace), params.bias, params.out, params.out_stride, params.m, params.n,
                               launch.tile.split};
  const bool vector = params.n % 4 == 0 && reinterpret_cast<uintptr_t>(params.out) % 8 == 0 && (params.out_stride % 4 == 0 || params.m == 1);
  const int64_t units = params.m * (vector ? params.n / 4 : params.n);
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((units + kSplitReduceThreads - 1) / kSplitReduceThreads));
  config.block = dim3(kSplitReduceThreads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  dandan::host::launch(vector ? split_reduce_kernel<T, 4> : split_reduce_kernel<T, 1>, config, p);
}

}  // namespace
}  // namespace dandan_gemm
