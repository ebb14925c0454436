// Computes   silu_and_mul: y = round(round(gate / (1 + exp(-gate))) * up).
// Tile       blockDim = (threads along a row, rows a block), grid = (groups of rows, chunks of a row); a thread has one 16-byte vector of its row.
//            Rows that are not made of whole aligned vectors: one element a thread and step.
// Pipeline   both loads of a thread, then arithmetic, then its store; the overlap is between the blocks of an SM.
// Layout     thread t of chunk c has vector c*threads + t of the row.
// Bound      bytes: 3*rows*cols elements; about 12 instructions an element.
// Requires   sm_80. The output may be the gate or the up operand itself.
// Selected   routes.h, silu_and_mul.
#pragma once

#include "common.cuh"

namespace dandan_norm {

inline constexpr int kElementwiseThreads = 512;

struct GluParams {
  AlignedRows gate, up, out;
  AlignedSpace space;
};

template <typename T>
__device__ __forceinline__ float silu_mul(float gate, float up) {
  float activated;
  if constexpr (sizeof(T) == 4) {
    activated = __fdiv_rn(gate, __fadd_rn(1.f, expf(-gate)));
  } else {
    activated = __fdividef(gate, __fadd_rn(1.f, __expf(-gate)));
  }
  return __fmul_rn(tile::to_float(tile::from_float<T>(activated)), up);
}

template <typename T>
__global__ void __launch_bounds__(kElementwiseThreads) sm80_elementwise_kernel(const __grid_constant__ GluParams p) {
  constexpr int kV = kPerVector<T>;
  const int row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  const int i = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  int quotient, rest;
  split_row(p.space, row, quotient, rest);

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (row >= p.space.rows || i >= p.space.vectors) return;
  const uint4 gate = ptx::ld_global_v4(row_of(p.gate, quotient, rest) + i);
  const uint4 up = ptx::ld_global_v4(row_of(p.up, quotient, rest) + i);
  float g[kV], f[kV];
  tile::unpack<T>(gate, g);
  tile::unpack<T>(up, f);
#pragma unroll
  for (int e = 0; e < kV; ++e) g[e] = silu_mul<T>(g[e], f[e]);
  ptx::st_global_v4(row_of(p.out, quotient, rest) + i, tile::pack<T>(g));
}

// Any strides: one element a thread and step.
template <typename T>
__global__ void __launch_bounds__(kElementwiseThreads) sm80_elementwise_any_kernel(const __grid_constant__ Params p) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < p.space.rows; row += step) {
    const T* gate = static_cast<const T*>(p.x.data) + tile::row_offset(p.space, p.x.strides, row);
    const T* up = static_cast<const T*>(p.other.data) + tile::row_offset(p.space, p.other.strides, row);
    T* out = static_cast<T*>(p.out.data) + tile::row_offset(p.space, p.out.strides, row);
    for (int64_t col = threadIdx.x; col < p.cols; col += blockDim.x) {
      const float g = tile::to_float(gate[col * p.x.strides.element]), u = tile::to_float(up[col * p.other.strides.element]);
      out[col * p.out.strides.element] = tile::from_float<T>(silu_mul<T>(g, u));
    }
  }
}

}  // namespace dandan_norm
