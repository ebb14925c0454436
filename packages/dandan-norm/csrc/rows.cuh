// Computes   rms_norm: y = round(x * rsqrt(mean(x^2) + eps) * w); residual_rms_norm: s = round(x + residual), y of s; layer_norm:
//            y = round((x - mean) * rsqrt(var + eps) * w + b), variance of the centred row; softmax: y = round(exp(x - max) / sum);
//            argmax: first NaN, else lowest index of the maximum.
// Tile       blockDim = (threads a row, rows a block), or a cluster of blocks a row; a thread keeps kVectors 16-byte vectors of it in registers.
// Pipeline   load x ------ reduce ------ scale, store
//                  load x ------ reduce ------ scale, store       the overlap is between the blocks of a multiprocessor: on an H200 (2026-12)
//            a grid of short blocks was 5% faster than persistent blocks that prefetch their next row.
// Layout     vector k of lane t is vector t + k*lanes of the row, a lane being a thread of the row's blocks: neighbours read neighbours.
// Bound      bytes: 2*rows*cols elements (4* with a residual, 1* for argmax), each once; a few FLOPs an element.
// Requires   sm_80 (clusters: sm_90); aligned rows of at most kVectors*lanes vectors; weight and bias of x's dtype; fewer than 2^31 rows.
// Selected   routes.h, by width; rows that are not aligned go to sm80_stream, which adds in the same order.
// Additions  elements of a vector in two chains, vectors of a lane pairwise, lanes of a warp by butterfly, warps in turn, blocks in turn. A lane is a
//            thread; in the norms, half of one that keeps four vectors. Narrow rows of layer_norm: fold_warps of common.cuh.
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

template <bool kCluster, typename V, int kValues>
struct RowScratch {
  tile::ReduceScratch<V, kValues> block;
  tile::ClusterScratch<V, kValues> cluster;
};
template <typename V, int kValues>
struct RowScratch<false, V, kValues> {
  tile::ReduceScratch<V, kValues> block;
};

// The row of this thread and its place in it.
template <bool kCluster>
struct RowThread {
  static constexpr int kWarps = 0;  // known at launch
  static constexpr bool kFolded = false, kLoadsInL1 = true;
  template <typename V, int kValues>
  using Scratch = RowScratch<kCluster, V, kValues>;
  int quotient, rest, row, lane, lanes;
  bool live;
  __device__ __forceinline__ explicit RowThread(const AlignedSpace& space) {
    if constexpr (kCluster) {
      ptx::barrier_cluster_arrive_release();  // see started()
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
  // Before the first write to another block's shared memory: that block has begun.
  static __device__ __forceinline__ void started() {
    if constexpr (kCluster) ptx::barrier_cluster_wait_acquire();
  }
  __device__ __forceinline__ bool holds(int k, const AlignedSpace& space) const { return live && lane + k * lanes < space.vectors; }
};

template <typename V, int kValues, int kThreads>
struct FoldedScratch {
  V values[kValues][kThreads];
};

// The same for a row that is folded onto one warp: kWarps warps hold it, and have the block for themselves where they are more than one.
template <int kRowWarps>
struct FoldedThread {
  static constexpr int kWarps = kRowWarps;
  static constexpr bool kFolded = true, kLoadsInL1 = false;  // the choice costs registers that four vectors a thread have not got
  template <typename V, int kValues>
  using Scratch = FoldedScratch<V, kValues, 32 * kWarps>;
  static constexpr int lanes = 32 * kWarps;
  int quotient, rest, row, lane;
  bool live;
  __device__ __forceinline__ explicit FoldedThread(const AlignedSpace& space) {
    row = static_cast<int>(kWarps == 1 ? blockIdx.x * blockDim.y + threadIdx.y : blockIdx.x);
    lane = static_cast<int>(threadIdx.x);
    live = row < space.rows;
    split_row(space, row, quotient, rest);
  }
  static __device__ __forceinline__ void started() {}
  __device__ __forceinline__ bool holds(int k, const AlignedSpace& space) const { return live && lane + k * lanes < space.vectors; }
};

// On an H200 (2026-12) loads that take a place in L1 were 5% faster once the call's tensors were larger than L2, 3% slower below.
template <int kVectors, typename At>
__device__ __forceinline__ void load_row(uint4 (&v)[kVectors], const AlignedRows& t, const At& at, const RowParams& p, uint4 filler) {
  const uint4* from = row_of(t, at.quotient, at.rest) + at.lane;
  if (At::kLoadsInL1 && p.in_l1) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) v[k] = ptx::ld_global_v4_if(at.holds(k, p.space), from + k * at.lanes, filler);
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) v[k] = ptx::ld_global_L1_no_allocate_v4_if(at.holds(k, p.space), from + k * at.lanes, filler);
  }
}

// Where a weight or bias row waits until the row's statistics are known. Measured on an H200 (2026-12); changes no bit.
enum class Keep : int {
  kRegisters = 0,  // many rows, and folded ones
  kShared = 1,     // few rows: copied beside the loads of x, so that the copy costs neither registers nor a second trip to memory
  kNowhere = 2     // read when needed: where registers are short
};

template <Keep kKeep, int kVectors>
struct AffineRow {
  const uint4* from;
  uint4* staged;
  uint4 kept[kKeep == Keep::kRegisters ? kVectors : 1];

  template <typename At>
  __device__ __forceinline__ AffineRow(const uint4* row, uint4* shared, const At& at, const AlignedSpace& space, uint4 absent)
      : from(row), staged(shared + threadIdx.y * blockDim.x + threadIdx.x) {
    if constexpr (kKeep == Keep::kRegisters) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) kept[k] = load(k, at, space, absent);
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

  template <typename At>
  __device__ __forceinline__ uint4 load(int k, const At& at, const AlignedSpace& space, uint4 absent) const {
    return ptx::ld_global_v4_if(from != nullptr && at.lane + k * at.lanes < space.vectors, from + at.lane + k * at.lanes, absent);
  }

  // Vector k of this thread, after cp_async_wait_all; a thread reads what it wrote itself.
  template <typename At>
  __device__ __forceinline__ uint4 read(int k, const At& at, const AlignedSpace& space, uint4 absent) const {
    if constexpr (kKeep == Keep::kRegisters) return kept[k];
    if constexpr (kKeep == Keep::kShared) return staged[k * (blockDim.x * blockDim.y)];
    return load(k, at, space, absent);
  }
};

template <typename Op, bool kCluster, typename V, int kValues, int kLanes>
__device__ __forceinline__ void reduce(const V (&in)[kValues][kLanes], V (&out)[kValues], RowScratch<kCluster, V, kValues>& scratch) {
  tile::row_reduce<Op>(in, out, scratch.block, 0);
  if constexpr (kCluster) tile::cluster_reduce<Op>(out, scratch.cluster);
}

// Sums over a row from those of each vector of this thread. A scratch serves once in a kernel.
template <bool kCluster, typename V, int kValues, int kVectors>
__device__ __forceinline__ void sum_row(V (&partial)[kValues][kVectors], V (&sum)[kValues], RowScratch<kCluster, V, kValues>& scratch) {
  V lanes[kValues][kLanesOf<kVectors>];
#pragma unroll
  for (int n = 0; n < kValues; ++n) lane_sums(partial[n], lanes[n]);
  reduce<tile::Sum>(lanes, sum, scratch);
}
template <typename V, int kValues, int kVectors, int kThreads>
__device__ __forceinline__ void sum_row(V (&partial)[kValues][kVectors], V (&sum)[kValues], FoldedScratch<V, kValues, kThreads>& scratch) {
#pragma unroll
  for (int n = 0; n < kValues; ++n) sum[n] = slot_sum(partial[n]);
  fold_warps<kThreads / 32>(sum, scratch.values, 0, static_cast<int>(threadIdx.x), kThreads / 32);
}

// Registers a thread may use. Few rows (their weights in shared memory): enough to keep all loads together. Many rows: few enough that many blocks
// share a multiprocessor.
template <int kVectors, Keep kKeep, bool kResidual = false>
inline constexpr int kRegisters = kVectors == 8               ? (kResidual ? 128 : 64)
                                  : kKeep == Keep::kShared    ? 64
                                  : kVectors == 2             ? 48
                                  : kKeep == Keep::kRegisters ? (kResidual ? 64 : 56)
                                                              : 48;

template <typename T, int kVectors, bool kResidual, Keep kKeep, bool kCluster>
__global__ void __maxnreg__((kRegisters<kVectors, kKeep, kResidual>)) row_rms_kernel(const __grid_constant__ RowParams p) {
  constexpr int kV = kPerVector<T>;
  extern __shared__ uint4 staged[];
  __shared__ RowScratch<kCluster, Accumulator<T>, 1> scratch;
  const RowThread<kCluster> at(p.space);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 x[kVectors], r[kVectors];

  ptx::griddepcontrol_wait();
  load_row(x, p.x, at, p, zero);
  if constexpr (kResidual) load_row(r, p.other, at, p, zero);
  const AffineRow<kKeep, kVectors> weight(p.weight, staged, at, p.space, tile::splat<T>(1.f));
  ptx::griddepcontrol_launch_dependents();
  at.started();

  Accumulator<T> partial[kVectors];
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
  Accumulator<T> lanes[1][kLanesOf<kVectors>], sum[1];
  lane_sums(partial, lanes[0]);
  reduce<tile::Sum>(lanes, sum, scratch);
  const float scale = inverse_sqrt<T>(__fmaf_rn(static_cast<float>(sum[0]), p.inverse_cols, p.eps));

  if constexpr (kKeep == Keep::kShared) ptx::cp_async_wait_all();
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

// Registers of layer_norm: enough that nothing is spilled. Folded rows keep weight and bias beside x, so that all their loads are under way at once.
template <typename T, int kVectors, Keep kKeep, typename Row>
inline constexpr int layer_norm_registers() {
  constexpr bool kExact = sizeof(T) == 4;
  if (Row::kFolded) {
    if (kVectors < 4) return 64;
    if (kKeep == Keep::kNowhere) return 56;
    return kExact || Row::kWarps == 1 ? 80 : 88;
  }
  if (kKeep != Keep::kShared && (kVectors == 2 || (kVectors == 4 && kExact))) return 56;
  return kRegisters<kVectors, kKeep>;
}

// x stays packed across a reduction and is unpacked again after it, where registers are short.
template <typename T, int kVectors>
__device__ __forceinline__ void repack(uint4 (&x)[kVectors]) {
  if constexpr (sizeof(T) == 2 && kVectors >= 4) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) tile::keep_packed(x[k]);
  }
}

// Row: RowThread or FoldedThread.
template <typename T, int kVectors, Keep kKeep, typename Row>
__global__ void __maxnreg__((layer_norm_registers<T, kVectors, kKeep, Row>())) row_layer_norm_kernel(const __grid_constant__ RowParams p) {
  constexpr int kV = kPerVector<T>;
  extern __shared__ uint4 staged[];
  constexpr bool kExact = sizeof(T) == 4;
  __shared__ typename Row::template Scratch<Accumulator<T>, 1> mean_scratch;
  __shared__ typename Row::template Scratch<Accumulator<T>, kExact ? 2 : 1> moment_scratch;
  const Row at(p.space);
  uint4 x[kVectors];

  ptx::griddepcontrol_wait();
  load_row(x, p.x, at, p, make_uint4(0, 0, 0, 0));
  const AffineRow<kKeep, kVectors> weight(p.weight, staged, at, p.space, tile::splat<T>(1.f));
  const AffineRow<kKeep, kVectors> bias(p.bias, staged + kVectors * (blockDim.x * blockDim.y), at, p.space, make_uint4(0, 0, 0, 0));
  ptx::griddepcontrol_launch_dependents();
  at.started();

  Accumulator<T> partial[1][kVectors], sum[1];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
    partial[0][k] = vector_sum(f);
  }
  sum_row(partial, sum, mean_scratch);
  repack<T>(x);
  const float mean = mean_of(sum[0], p.inverse_cols);

  // fp32: the mean is rounded; what is left of it in the centred row is taken off as well. 16-bit inputs cannot tell the difference.
  Accumulator<T> centred[kExact ? 2 : 1][kVectors], moments[kExact ? 2 : 1];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = at.holds(k, p.space) ? __fsub_rn(f[e], mean) : 0.f;
    centred[0][k] = vector_sum_squares(f);
    if constexpr (kExact) centred[1][k] = vector_sum(f);
  }
  sum_row(centred, moments, moment_scratch);
  repack<T>(x);
  const Centre<T> centre(mean, moments, p.inverse_cols);
  const float scale = inverse_sqrt<T>(__fadd_rn(centre.variance, p.eps));

  if constexpr (kKeep == Keep::kShared) ptx::cp_async_wait_all();
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
__global__ void __maxnreg__((kRegisters<kVectors, kVectors == 2 ? Keep::kShared : Keep::kRegisters>)) row_softmax_kernel(const __grid_constant__ RowParams p) {
  constexpr int kV = kPerVector<T>;
  __shared__ RowScratch<kCluster, float, 1> max_scratch;
  __shared__ RowScratch<kCluster, Accumulator<T>, 1> sum_scratch;
  const RowThread<kCluster> at(p.space);
  uint4 x[kVectors];

  ptx::griddepcontrol_wait();
  load_row(x, p.x, at, p, tile::splat<T>(-INFINITY));
  ptx::griddepcontrol_launch_dependents();
  at.started();

  float largest[1][1] = {{-INFINITY}}, max[1];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) largest[0][0] = tile::Max::apply(largest[0][0], tile::vector_max<T>(x[k]));
  reduce<tile::Max>(largest, max, max_scratch);
  const Exp<T> exponential(max[0]);

  Accumulator<T> partial[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = exponential(f[e]);
    partial[k] = exponential_sum<T>(f);
  }
  Accumulator<T> lanes[1][1] = {{slot_sum(partial)}}, sum[1];
  reduce<tile::Sum>(lanes, sum, sum_scratch);
  const Quotient<T> over_sum(static_cast<float>(sum[0]));

  uint4* to = row_of(p.out, at.quotient, at.rest) + at.lane;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kV];
    tile::unpack<T>(x[k], f);
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = over_sum(exponential(f[e]));
    if (at.holds(k, p.space)) ptx::st_global_v4(to + k * at.lanes, tile::pack<T>(f));
  }
}

// Any width: kVectors vectors a lane at a time.
template <typename T, int kVectors, bool kCluster>
__global__ void __maxnreg__(64) row_argmax_kernel(const __grid_constant__ RowParams p) {
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
  at.started();
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

}  // namespace dandan_norm
