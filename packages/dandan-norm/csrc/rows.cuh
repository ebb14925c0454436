// Computes   rms_norm: y = round(x * rsqrt(mean(x^2) + eps) * w); residual_rms_norm: s = round(x + residual), y of s; layer_norm:
//            y = round((x - mean) * rsqrt(var + eps) * w + b), variance of the centred row; softmax: y = round(exp(x - max) / sum);
//            argmax: first NaN, else lowest index of the maximum.
// Tile       blockDim = (threads a row, rows a block), or a cluster of blocks a row; a thread keeps kVectors 16-byte vectors of it in registers.
// Pipeline   load x, copy w to shared ------ reduce ------ scale, store
//                  load x, copy w to shared ------ reduce ------ scale, store       the overlap is between the blocks of an SM: on an
//            H200 (2026-12) a grid of short blocks was 5% faster than persistent blocks that prefetch their next row.
// Layout     vector k of lane t is vector t + k*lanes of the row, a lane being a thread of the row's blocks: neighbours read neighbours.
// Bound      bytes: 2*rows*cols elements (4* with a residual, 1* for argmax), each once; a few FLOPs an element.
// Requires   sm_80 (clusters: sm_90); aligned rows of at most kVectors*lanes vectors; weight and bias of x's dtype; fewer than 2^31 rows.
// Selected   routes.h, by width; rows that are not aligned go to sm80_stream, which adds in the same order.
// Additions  elements of a vector in two chains, vectors of a thread pairwise, lanes of a warp by butterfly, warps in turn, blocks in turn.
#pragma once

#include <dandan/ptx/cp_async.cuh>

#include "argmax.cuh"
#include "common.cuh"

namespace dandan_norm {

struct RowParams {
  AlignedRows x, out;
  AlignedSpace space;
  const uint4* weight;
  const uint4* bias;
  float inverse_cols, eps;
  bool in_l1;                 // see load_row
  AlignedRows other, second;  // residual and sum
  int64_t* index;             // argmax: row r at index[r]
};

// The row of this thread and its place in it.
template <bool kCluster>
struct RowThread {
  int quotient, rest, row, lane, lanes;
  bool live;
  __device__ __forceinline__ explicit RowThread(const AlignedSpace& space) {
    if constexpr (kCluster) {
      const int blocks = static_cast<int>(ptx::cluster_nctarank());
      row = static_cast<int>(blockIdx.x) / blocks;
      lane = static_cast<int>(ptx::cluster_ctarank() * blockDim.x + threadIdx.x);
      lanes = static_cast<int>(blockDim.x) * blocks;
    } else {
      row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
      lane = static_cast<int>(threadIdx.x);
      lanes = static_cast<int>(blockDim.x);
    }
    live = row < space.rows;
    split_row(space, row, quotient, rest);
  }
  __device__ __forceinline__ bool holds(int k, const AlignedSpace& space) const { return live && lane + k * lanes < space.vectors; }
};

// On an H200 (2026-12) loads that take a place in L1 were 5% faster once the call's tensors were larger than L2, 3% slower below.
template <int kVectors, typename At>
__device__ __forceinline__ void load_row(uint4 (&v)[kVectors], const AlignedRows& t, const At& at, const RowParams& p, uint4 filler) {
  const uint4* from = row_of(t, at.quotient, at.rest) + at.lane;
  if (p.in_l1) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) v[k] = ptx::ld_global_v4_if(at.holds(k, p.space), from + k * at.lanes, filler);
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) v[k] = ptx::ld_global_L1_no_allocate_v4_if(at.holds(k, p.space), from + k * at.lanes, filler);
  }
}

// A weight or bias row as a kernel keeps it until the row's statistics are known.
enum class Keep {
  kRegisters,  // up to four vectors a thread
  kShared,     // the same beside a second such row: copied while x is loaded, costs no registers
  kNowhere     // more than four vectors a thread: read when needed
};

template <int kVectors, Keep kKeep>
struct AffineRow {
  const uint4* from;
  uint4* staged;
  uint4 kept[kKeep == Keep::kRegisters ? kVectors : 1];

  template <typename At>
  __device__ __forceinline__ AffineRow(const uint4* row, uint4* shared, const At& at, const AlignedSpace& space, uint4 absent)
      : from(row), staged(shared + threadIdx.y * blockDim.x + threadIdx.x) {
    if constexpr (kKeep == Keep::kRegisters) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        kept[k] = ptx::ld_global_v4_if(from != nullptr && at.lane + k * at.lanes < space.vectors, from + at.lane + k * at.lanes, absent);
      }
    } else if constexpr (kKeep == Keep::kShared) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (from != nullptr && at.lane + k * at.lanes < space.vectors) {
          ptx::cp_async_cg_16(staged + k * (blockDim.x * blockDim.y), from + at.lane + k * at.lanes);
        } else {
          staged[k * (blockDim.x * blockDim.y)] = absent;
        }
      }
    }
  }

  // Vector k of this thread, after cp_async_wait_all; a thread reads what it wrote itself.
  template <typename At>
  __device__ __forceinline__ uint4 read(int k, const At& at, const AlignedSpace& space, uint4 absent) const {
    if constexpr (kKeep == Keep::kRegisters) {
      return kept[k];
    } else if constexpr (kKeep == Keep::kShared) {
      return staged[k * (blockDim.x * blockDim.y)];
    } else {
      return ptx::ld_global_v4_if(from != nullptr && at.lane + k * at.lanes < space.vectors, from + at.lane + k * at.lanes, absent);
    }
  }
};

template <bool kCluster, int kValues>
struct Scratch {
  tile::ReduceScratch<kValues> block;
  tile::ClusterScratch<kValues> cluster;
};
template <int kValues>
struct Scratch<false, kValues> {
  tile::ReduceScratch<kValues> block;
};

// `half` is 0 for a kernel's first reduction, 1 for its second.
template <typename Op, bool kCluster, int kValues, int kScratch>
__device__ __forceinline__ void reduce(float (&v)[kValues], Scratch<kCluster, kScratch>& scratch, int half) {
  tile::row_reduce<Op>(v, scratch.block, half);
  if constexpr (kCluster) tile::cluster_reduce<Op>(v, scratch.cluster, half);
}

template <int kVectors>
inline constexpr int kMinBlocks = kVectors <= 4 ? 2 : 1;

template <typename T, int kVectors, bool kResidual, bool kCluster>
__global__ void __launch_bounds__(512, kMinBlocks<kVectors>) row_rms_kernel(const __grid_constant__ RowParams p) {
  constexpr int kV = kPerVector<T>;
  __shared__ Scratch<kCluster, 1> scratch;
  const RowThread<kCluster> at(p.space);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 x[kVectors], r[kVectors];

  ptx::griddepcontrol_wait();
  load_row(x, p.x, at, p, zero);
  if constexpr (kResidual) load_row(r, p.other, at, p, zero);
  const AffineRow<kVectors, kVectors <= 4 ? Keep::kRegisters : Keep::kNowhere> weight(p.weight, nullptr, at, p.space, tile::splat<T>(1.f));
  ptx::griddepcontrol_launch_dependents();

  float partial[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
    if constexpr (kResidual) {
      float g[kV];
      tile::unpack<T>(r[k], g);
#pragma unroll
      for (int e = 0; e < kV; ++e) f[e] = __fadd_rn(f[e], g[e]);
      x[k] = tile::pack<T>(f);
      tile::unpack<T>(x[k], f);
      if (at.holds(k, p.space)) ptx::st_global_v4(row_of(p.second, at.quotient, at.rest) + at.lane + k * at.lanes, x[k]);
    }
    partial[k] = vector_sum_squares(f);
  }
  float sum[1] = {slot_sum(partial)};
  reduce<tile::Sum>(sum, scratch, 0);
  const float scale = inverse_sqrt<T>(__fmaf_rn(sum[0], p.inverse_cols, p.eps));

  uint4* to = row_of(p.out, at.quotient, at.rest) + at.lane;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV], g[kV];
    tile::unpack<T>(x[k], f);
    tile::unpack<T>(weight.read(k, at, p.space, tile::splat<T>(1.f)), g);
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = __fmul_rn(__fmul_rn(f[e], scale), g[e]);
    if (at.holds(k, p.space)) ptx::st_global_v4(to + k * at.lanes, tile::pack<T>(f));
  }
}

template <typename T, int kVectors, bool kCluster>
__global__ void __launch_bounds__(512, kMinBlocks<kVectors>) row_layer_norm_kernel(const __grid_constant__ RowParams p) {
  constexpr int kV = kPerVector<T>;
  extern __shared__ uint4 staged[];
  __shared__ Scratch<kCluster, 2> scratch;
  const RowThread<kCluster> at(p.space);
  uint4 x[kVectors];

  ptx::griddepcontrol_wait();
  load_row(x, p.x, at, p, make_uint4(0, 0, 0, 0));
  constexpr Keep kKeep = kVectors <= 4 ? Keep::kShared : Keep::kNowhere;
  const AffineRow<kVectors, kKeep> weight(p.weight, staged, at, p.space, tile::splat<T>(1.f));
  const AffineRow<kVectors, kKeep> bias(p.bias, staged + kVectors * (blockDim.x * blockDim.y), at, p.space, make_uint4(0, 0, 0, 0));
  ptx::griddepcontrol_launch_dependents();

  float partial[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
    partial[k] = vector_sum(f);
  }
  float sum[1] = {slot_sum(partial)};
  reduce<tile::Sum>(sum, scratch, 0);
  const float mean = __fmul_rn(sum[0], p.inverse_cols);

  // fp32: the mean is rounded; what is left of it in the centred row is taken off as well. 16-bit inputs cannot tell the difference.
  constexpr bool kExact = sizeof(T) == 4;
  float first[kVectors], second[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = at.holds(k, p.space) ? __fsub_rn(f[e], mean) : 0.f;
    if constexpr (kExact) first[k] = vector_sum(f);
    second[k] = vector_sum_squares(f);
  }
  float moments[kExact ? 2 : 1] = {slot_sum(second)};
  if constexpr (kExact) moments[1] = slot_sum(first);
  reduce<tile::Sum>(moments, scratch, 1);
  const Centre<T> centre(mean, moments, p.inverse_cols);
  const float scale = inverse_sqrt<T>(__fadd_rn(centre.variance, p.eps));

  ptx::cp_async_wait_all();
  uint4* to = row_of(p.out, at.quotient, at.rest) + at.lane;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV], g[kV], h[kV];
    tile::unpack<T>(x[k], f);
    tile::unpack<T>(weight.read(k, at, p.space, tile::splat<T>(1.f)), g);
    tile::unpack<T>(bias.read(k, at, p.space, make_uint4(0, 0, 0, 0)), h);
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = __fmaf_rn(__fmul_rn(centre(f[e]), scale), g[e], h[e]);
    if (at.holds(k, p.space)) ptx::st_global_v4(to + k * at.lanes, tile::pack<T>(f));
  }
}

template <typename T, int kVectors, bool kCluster>
__global__ void __launch_bounds__(512, kMinBlocks<kVectors>) row_softmax_kernel(const __grid_constant__ RowParams p) {
  constexpr int kV = kPerVector<T>;
  __shared__ Scratch<kCluster, 1> scratch;
  const RowThread<kCluster> at(p.space);
  uint4 x[kVectors];

  ptx::griddepcontrol_wait();
  load_row(x, p.x, at, p, tile::splat<T>(-INFINITY));
  ptx::griddepcontrol_launch_dependents();

  float max[1] = {-INFINITY};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) max[0] = tile::Max::apply(max[0], tile::vector_max<T>(x[k]));
  reduce<tile::Max>(max, scratch, 0);
  const Exp<T> exponential(max[0]);

  float partial[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = exponential(f[e]);
    partial[k] = vector_sum(f);
  }
  float sum[1] = {slot_sum(partial)};
  reduce<tile::Sum>(sum, scratch, 1);
  const float scale = reciprocal<T>(sum[0]);

  uint4* to = row_of(p.out, at.quotient, at.rest) + at.lane;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = __fmul_rn(exponential(f[e]), scale);
    if (at.holds(k, p.space)) ptx::st_global_v4(to + k * at.lanes, tile::pack<T>(f));
  }
}

// Any width: kVectors vectors a lane at a time.
template <typename T, int kVectors, bool kCluster>
__global__ void __launch_bounds__(512, 2) row_argmax_kernel(const __grid_constant__ RowParams p) {
  __shared__ tile::KeyScratch scratch;
  __shared__ uint64_t cluster_scratch[kCluster ? tile::kMaxCluster : 1];
  const RowThread<kCluster> at(p.space);
  ptx::griddepcontrol_wait();
  const uint4* from = row_of(p.x, at.quotient, at.rest);
  ArgmaxCandidate<T> best(static_cast<uint32_t>(at.lane));
  for (int first = at.lane; at.live && first < p.space.vectors; first += at.lanes * kVectors) {
    uint4 x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      x[k] = ptx::ld_global_v4_if(first + k * at.lanes < p.space.vectors, from + first + k * at.lanes, tile::splat<T>(-INFINITY));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) best.offer(x[k], static_cast<uint32_t>(first + k * at.lanes));
  }
  ptx::griddepcontrol_launch_dependents();
  uint64_t key = tile::row_reduce_max(best.key(p.space.vectors), scratch, 0);
  if constexpr (kCluster) key = tile::cluster_reduce_max(key, cluster_scratch);
  if (at.live && at.lane == 0) p.index[at.row] = index_of(key);
}

inline constexpr int64_t kL2Bytes = 50 << 20;  // of an H200; a matter of speed alone

inline RowParams row_params(DType dtype, const Params& p) {
  RowParams r = {};
  r.x = aligned_rows(dtype, p, p.x);
  r.out = aligned_rows(dtype, p, p.out);
  r.space = aligned_space(dtype, p);
  r.weight = static_cast<const uint4*>(p.weight.data);
  r.bias = static_cast<const uint4*>(p.bias.data);
  r.inverse_cols = 1.f / static_cast<float>(p.cols);
  r.eps = p.eps;
  const int64_t tensors = p.other.data != nullptr ? 4 : 2;
  r.in_l1 = tensors * p.space.rows * p.cols * dtype_size(dtype) > kL2Bytes;
  r.index = static_cast<int64_t*>(p.out.data);
  if (p.other.data != nullptr) {
    r.other = aligned_rows(dtype, p, p.other);
    r.second = aligned_rows(dtype, p, p.second);
  }
  return r;
}

// Grid, block, and shared memory for `affine` staged rows.
inline dandan::host::LaunchConfig row_launch_config(const Params& p, const Launch& launch, int affine) {
  auto config = row_config(p.space.rows, launch);
  if (launch.tile.vectors <= 4) {
    config.shared_bytes = static_cast<size_t>(affine) * launch.tile.vectors * launch.tile.threads * launch.tile.rows * sizeof(uint4);
  }
  return config;
}

}  // namespace dandan_norm
