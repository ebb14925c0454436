// Computes   out[m, n] = round(a[m, k] . b + bias): fp32 sums of fp16 or bf16 products, one rounding.
// Tile       kTileX x kTileY of the result for a block: warp groups of 64 (or 128) rows x, all columns y. x are rows of a and y columns of b, or, where
//            tokens are few (kSwap), x are columns of b and y rows of a, so that 64 rows of the instruction are weights and not padding.
// Pipeline   one warp copies, kConsumers warp groups multiply; kStages slices of 64 k in shared memory, a full and an empty barrier each.
//              copy      s0 s1 s2 s3 .. s0 s1       (a slice is asked for as soon as its stage is empty)
//              multiply     s0 s1 s2 s3 .. s0       (the instruction of slice i runs while slice i+1 is awaited)
//            persistent: a block goes on to its next tile while the tile before is stored by the copy engine.
//            split: one tile a cluster, a slice of K a block; the blocks add their fp32 tiles through distributed shared memory, in order of rank.
// Layout     slice of an operand, K contiguous: rows of 64 k = 128 bytes, 16-byte chunk c of row r at place c ^ (r % 8); N contiguous ([k, n] weights):
//            boxes of 64 n, rows of one k, swizzled alike, read transposed by the instruction.
// Bound      bytes: (m*k + n*k + m*n) * 2 over DRAM; FLOPs: 2*m*n*k over the tensor rate (H200: 989 TF).
// Requires   sm_90a; rows of a and b at multiples of 16 bytes.
// Selected   routes.h, by cost.
#pragma once

#include <cuda.h>

#include <dandan/ptx/cluster.cuh>
#include <dandan/ptx/mbarrier.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/ptx/tma.cuh>
#include <dandan/ptx/wgmma.cuh>

namespace dandan_gemm {

namespace ptx = dandan::ptx;

inline constexpr int kSliceK = 64;                   // elements of K in a stage: 128 bytes, the width of the swizzle
inline constexpr int kRowBytes = kSliceK * 2;
inline constexpr int kBoxBytes = kSliceK * kRowBytes;  // 64 rows

template <int kTileX_, int kTileY_, int kStages_, bool kSwap_, int kBlocksX_ = 1>
struct WgmmaConfig {
  static constexpr int kTileX = kTileX_, kTileY = kTileY_, kStages = kStages_, kBlocksX = kBlocksX_;
  static constexpr bool kSwap = kSwap_;
  static constexpr int kTileM = kSwap ? kTileY : kTileX, kTileN = kSwap ? kTileX : kTileY;
  static constexpr int kConsumers = kTileX / (64 * kBlocksX);  // warp groups
  static constexpr int kThreads = kConsumers * 128 + 32;
  static constexpr int kBytesX = kTileX * kRowBytes, kBytesY = kTileY * kRowBytes, kStageBytes = kBytesX + kBytesY;
};

struct WgmmaParams {
  CUtensorMap a, b, out;
  void* out_data;
  const void* bias;
  int64_t out_stride;
  int m, n, slices;      // slices of K
  int tiles_m, tiles_n;
  int raster;            // persistent: row tiles of a group that shares columns of b in L2
  bool vector_out;       // out has a tensor map: rows at multiples of 16 bytes
  bool static_weight;
  bool weight_once;      // a weight is read by one tile alone
};

struct Pipeline {
  int stage = 0;
  uint32_t parity = 0;
  template <int kStages>
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The part of shared memory that both kernels share.
template <class C>
struct Stages {
  uint32_t base, full, empty;  // shared addresses
  __device__ __forceinline__ uint32_t x(int s) const { return base + s * C::kStageBytes; }
  __device__ __forceinline__ uint32_t y(int s) const { return base + s * C::kStageBytes + C::kBytesX; }
  __device__ __forceinline__ uint32_t full_at(int s) const { return full + 8 * s; }
  __device__ __forceinline__ uint32_t empty_at(int s) const { return empty + 8 * s; }
};

template <class C>
inline constexpr int kBarrierBytes = 16 * C::kStages;
// Stages start at a multiple of 1024 bytes: the period of the swizzle.
template <class C>
inline constexpr int kPipelineBytes = C::kStages * C::kStageBytes + 1024 + kBarrierBytes<C>;

template <class C>
__device__ __forceinline__ Stages<C> set_up_stages(unsigned char* shared, const WgmmaParams& p) {
  Stages<C> s;
  s.base = (ptx::shared_address(shared) + 1023) & ~1023u;
  s.full = s.base + C::kStages * C::kStageBytes;
  s.empty = s.full + 8 * C::kStages;
  if (threadIdx.x == C::kConsumers * 128) {  // the thread that copies: it need not wait for the others to see its barriers
    ptx::prefetch_tensormap(&p.a);
    ptx::prefetch_tensormap(&p.b);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(s.full_at(i), 1);
      ptx::mbarrier_init(s.empty_at(i), C::kConsumers * 4);
    }
    ptx::fence_mbarrier_init();
  }
  return s;
}

// Copies of one operand's slice: `rows` from `first`, 64 k from `k`.
template <int kRows, bool kOuterContiguous>
__device__ __forceinline__ void copy_slice(uint32_t to, const CUtensorMap& map, int first, int k, uint32_t barrier, uint64_t hint) {
  if constexpr (kOuterContiguous) {
#pragma unroll
    for (int box = 0; box < kRows / 64; ++box) ptx::cp_async_bulk_tensor_2d(to + box * kBoxBytes, &map, first + box * 64, k, barrier, hint);
  } else {
    ptx::cp_async_bulk_tensor_2d(to, &map, k, first, barrier, hint);
  }
}

// The multiplications of a warp group over `count` slices.
template <typename T, class C, bool kWeightOuter>
__device__ __forceinline__ void multiply(float (&sums)[C::kBlocksX][C::kTileY / 2], const Stages<C>& s, Pipeline& pipeline, int group, int count) {
  constexpr bool kXOuter = C::kSwap && kWeightOuter, kYOuter = !C::kSwap && kWeightOuter;
  int previous = -1;
  const bool leader = threadIdx.x % 32 == 0;
  const auto release = [&](int stage) {
    if (leader) ptx::mbarrier_arrive(s.empty_at(stage));
  };
  for (int i = 0; i < count; ++i) {
    ptx::mbarrier_wait(s.full_at(pipeline.stage), pipeline.parity);
    const uint64_t x = ptx::wgmma_descriptor(s.x(pipeline.stage) + group * C::kBlocksX * kBoxBytes, kBoxBytes, 1024);
    const uint64_t y = ptx::wgmma_descriptor(s.y(pipeline.stage), kBoxBytes, 1024);
#pragma unroll
    for (int block = 0; block < C::kBlocksX; ++block) ptx::wgmma_fence_registers(sums[block]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSliceK / 16; ++step) {
      // 16 k are 32 bytes of a row, or 16 rows of 128 bytes; a descriptor counts in 16 bytes.
#pragma unroll
      for (int block = 0; block < C::kBlocksX; ++block) {
        ptx::Wgmma<T, C::kTileY, kXOuter, kYOuter>::run(sums[block], x + block * (kBoxBytes / 16) + step * (kXOuter ? 128 : 2),
                                                        y + step * (kYOuter ? 128 : 2), i + step > 0);
      }
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    if (previous >= 0) release(previous);
    previous = pipeline.stage;
    pipeline.template next<C::kStages>();
  }
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (int block = 0; block < C::kBlocksX; ++block) ptx::wgmma_fence_registers(sums[block]);
  if (previous >= 0) release(previous);
}

template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t packed;
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <typename T>
__device__ __forceinline__ float bias_at(const void* bias, int column, int columns) {
  return bias != nullptr && column < columns ? static_cast<float>(static_cast<const T*>(bias)[column]) : 0.f;
}

__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---------------------------------------------------------------- one tile a cluster, K split over its blocks

// Elements between rows of the 16-bit result that waits for its stores: writes of a warp fall into different banks.
template <class C>
inline constexpr int kResultStride = C::kTileN + 8;
template <class C>
inline constexpr int kResultBytes = C::kTileM * kResultStride<C> * 2;
// Groups of four accumulators of a thread, and how many of them a block adds.
template <class C>
inline constexpr int kFours = C::kBlocksX * C::kTileY / 8;
template <class C, int kSplit>
inline constexpr int kShare = (kFours<C> + kSplit - 1) / kSplit;
// What the other blocks send. It lies behind the stages, so that a block need not wait for the others to have read theirs, unless that is too much.
template <class C, int kSplit>
inline constexpr int kInboxBytes = (kSplit - 1) * kShare<C, kSplit> * C::kConsumers * 128 * 16;
inline constexpr int kMostShared = 232448 - 1024;
template <class C, int kSplit>
inline constexpr bool kInboxApart = kPipelineBytes<C> + kInboxBytes<C, kSplit> <= kMostShared;
template <class C, int kSplit>
inline constexpr int kSplitShared = kInboxApart<C, kSplit> ? kPipelineBytes<C> + kInboxBytes<C, kSplit> : kPipelineBytes<C>;

template <typename T, class C, bool kWeightOuter, int kSplit>
__global__ void __launch_bounds__(C::kThreads) wgmma_split_kernel(const __grid_constant__ WgmmaParams p) {
  extern __shared__ unsigned char shared[];
  const int rank = kSplit > 1 ? static_cast<int>(ptx::cluster_ctarank()) : 0;
  const int tile = static_cast<int>(blockIdx.x) / kSplit;
  const int m0 = tile % p.tiles_m * C::kTileM, n0 = tile / p.tiles_m * C::kTileN;
  const int x0 = C::kSwap ? n0 : m0, y0 = C::kSwap ? m0 : n0;
  constexpr bool kXOuter = C::kSwap && kWeightOuter, kYOuter = !C::kSwap && kWeightOuter;
  const int first = static_cast<int>(static_cast<int64_t>(p.slices) * rank / kSplit);
  const int count = static_cast<int>(static_cast<int64_t>(p.slices) * (rank + 1) / kSplit) - first;
  static_assert(kInboxApart<C, kSplit> ? kResultBytes<C> <= C::kStages * C::kStageBytes
                                       : kInboxBytes<C, kSplit> + kResultBytes<C> <= C::kStages * C::kStageBytes);
  if constexpr (kSplit > 1) ptx::barrier_cluster_arrive_release();  // waited for before the first write to another block: it has begun
  const Stages<C> s = set_up_stages<C>(shared, p);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool copier = threadIdx.x == C::kConsumers * 128;
  const uint64_t weight_hint = p.weight_once ? ptx::kEvictFirst : ptx::kEvictNormal;
  const auto copy_weight = [&](int i, int stage) {
    if constexpr (C::kSwap) copy_slice<C::kTileX, kXOuter>(s.x(stage), p.b, x0, (first + i) * kSliceK, s.full_at(stage), weight_hint);
    else copy_slice<C::kTileY, kYOuter>(s.y(stage), p.b, y0, (first + i) * kSliceK, s.full_at(stage), weight_hint);
  };
  const auto copy_rows = [&](int i, int stage) {
    if constexpr (C::kSwap) copy_slice<C::kTileY, false>(s.y(stage), p.a, y0, (first + i) * kSliceK, s.full_at(stage), ptx::kEvictNormal);
    else copy_slice<C::kTileX, false>(s.x(stage), p.a, x0, (first + i) * kSliceK, s.full_at(stage), ptx::kEvictNormal);
  };
  if (copier) {
    // Static weights may be read before the kernels enqueued earlier have ended.
    const int ahead = min(count, C::kStages);
    if (!p.static_weight) ptx::griddepcontrol_wait();
    for (int i = 0; i < ahead; ++i) {
      ptx::mbarrier_arrive_expect_tx(s.full_at(i), C::kStageBytes);
      copy_weight(i, i);
      if (!p.static_weight) copy_rows(i, i);
    }
    if (p.static_weight) {
      ptx::griddepcontrol_wait();
      for (int i = 0; i < ahead; ++i) copy_rows(i, i);
    }
  }
  __syncthreads();  // the barriers are set up

  if (warp == C::kConsumers * 4) {
    if (copier) {
      Pipeline pipeline;
      for (int i = C::kStages; i < count; ++i) {
        ptx::mbarrier_wait(s.empty_at(pipeline.stage), pipeline.parity);
        ptx::mbarrier_arrive_expect_tx(s.full_at(pipeline.stage), C::kStageBytes);
        copy_weight(i, pipeline.stage);
        copy_rows(i, pipeline.stage);
        pipeline.template next<C::kStages>();
      }
      ptx::griddepcontrol_launch_dependents();
    }
    __syncwarp();
  } else {
    float sums[C::kBlocksX][C::kTileY / 2];
    const int group = warp / 4;
    Pipeline pipeline;
    multiply<T, C, kWeightOuter>(sums, s, pipeline, group, count);
    if (count == 0) {
#pragma unroll
      for (int block = 0; block < C::kBlocksX; ++block) {
#pragma unroll
        for (int i = 0; i < C::kTileY / 2; ++i) sums[block][i] = 0.f;
      }
    }
    const int thread = static_cast<int>(threadIdx.x);
    constexpr int kAdders = C::kConsumers * 128;
    if constexpr (kSplit > 1) {
      // Block r gets groups [r * kShare, (r + 1) * kShare) of every thread, from the same thread of each other block.
      const uint32_t inbox_address = kInboxApart<C, kSplit> ? s.empty + 8 * C::kStages : s.base;
      ptx::barrier_cluster_wait_acquire();
      if constexpr (!kInboxApart<C, kSplit>) {
        ptx::barrier_cluster_arrive_release();  // all slices of all blocks have been read
        ptx::barrier_cluster_wait_acquire();
      }
#pragma unroll
      for (int four = 0; four < kFours<C>; ++four) {
        const int owner = four / kShare<C, kSplit>;
        if (owner != rank) {
          const uint32_t slot = rank < owner ? rank : rank - 1;
          const uint32_t to = ptx::mapa(inbox_address + ((slot * kShare<C, kSplit> + four % kShare<C, kSplit>) * kAdders + thread) * 16, owner);
          const float* d = &sums[four / (C::kTileY / 8)][four % (C::kTileY / 8) * 4];
          asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]) : "memory");
        }
      }
      ptx::barrier_cluster_arrive_release();
      ptx::barrier_cluster_wait_acquire();
    } else {
      named_barrier(1, kAdders);
    }
    ptx::griddepcontrol_wait();
    unsigned char* const stages = shared + (s.base - ptx::shared_address(shared));
    const float4* const inbox = reinterpret_cast<const float4*>(kInboxApart<C, kSplit> ? stages + (s.empty - s.base) + 8 * C::kStages : stages);
    T* const result = reinterpret_cast<T*>(stages + (kInboxApart<C, kSplit> ? 0 : kInboxBytes<C, kSplit>));
    const int row = group * C::kBlocksX * 64 + warp % 4 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
    for (int four = 0; four < kFours<C>; ++four) {
      if (four / kShare<C, kSplit> != rank) continue;
      float* d = &sums[four / (C::kTileY / 8)][four % (C::kTileY / 8) * 4];
      float4 total = make_float4(d[0], d[1], d[2], d[3]);
#pragma unroll
      for (int r = 0; r < kSplit - 1; ++r) {
        // In order of rank: the first `rank` slots, this block, the others.
        const float4 v = inbox[(r * kShare<C, kSplit> + four % kShare<C, kSplit>) * kAdders + thread];
        if (r < rank) {
          total = r == 0 ? v : make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
          if (r == rank - 1) total = make_float4(total.x + d[0], total.y + d[1], total.z + d[2], total.w + d[3]);
        } else {
          total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
        }
      }
      const int x = row + four / (C::kTileY / 8) * 64, y = four % (C::kTileY / 8) * 8 + column;
      if (p.bias != nullptr) {
        if constexpr (C::kSwap) {
          const float low = bias_at<T>(p.bias, n0 + x, p.n), high = bias_at<T>(p.bias, n0 + x + 8, p.n);
          total = make_float4(total.x + low, total.y + low, total.z + high, total.w + high);
        } else {
          const float low = bias_at<T>(p.bias, n0 + y, p.n), high = bias_at<T>(p.bias, n0 + y + 1, p.n);
          total = make_float4(total.x + low, total.y + high, total.z + low, total.w + high);
        }
      }
      if constexpr (C::kSwap) {
        result[y * kResultStride<C> + x] = static_cast<T>(total.x);
        result[(y + 1) * kResultStride<C> + x] = static_cast<T>(total.y);
        result[y * kResultStride<C> + x + 8] = static_cast<T>(total.z);
        result[(y + 1) * kResultStride<C> + x + 8] = static_cast<T>(total.w);
      } else {
        *reinterpret_cast<uint32_t*>(result + x * kResultStride<C> + y) = pack2<T>(total.x, total.y);
        *reinterpret_cast<uint32_t*>(result + (x + 8) * kResultStride<C> + y) = pack2<T>(total.z, total.w);
      }
    }
    named_barrier(1, kAdders);
    // This block's share: tokens (kSwap), columns, or 64 rows of each warp group.
    const auto store = [&](int x, int y, int count_n) {
      const int m = m0 + (C::kSwap ? y : x), n = n0 + (C::kSwap ? x : y);
      if (m >= p.m || n >= p.n) return;
      const T* from = result + (C::kSwap ? y * kResultStride<C> + x : x * kResultStride<C> + y);
      T* const to = static_cast<T*>(p.out_data) + m * p.out_stride + n;
      if (p.vector_out && n + count_n <= p.n) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int e = 0; e < count_n && n + e < p.n; ++e) to[e] = from[e];
      }
    };
    // Units of 8 columns of n: 8 consecutive x of one y, or one group's 8 consecutive y of one x.
    constexpr int kUnitsOfFour = C::kTileX / C::kBlocksX;  // of one group of four accumulators over all threads: 64 x 8 elements a warp group
    for (int unit = thread; unit < min(kShare<C, kSplit>, kFours<C> - rank * kShare<C, kSplit>) * kUnitsOfFour; unit += kAdders) {
      const int four = rank * kShare<C, kSplit> + unit / kUnitsOfFour, rest = unit % kUnitsOfFour;
      const int block = four / (C::kTileY / 8), y8 = four % (C::kTileY / 8) * 8;
      if constexpr (C::kSwap) {
        const int chunk = rest % (kUnitsOfFour / 8) * 8, y = y8 + rest / (kUnitsOfFour / 8);
        store(chunk / 64 * C::kBlocksX * 64 + block * 64 + chunk % 64, y, 8);
      } else {
        store(rest / 64 * C::kBlocksX * 64 + block * 64 + rest % 64, y8, 8);
      }
    }
  }
  if (kSplit > 1 && warp == C::kConsumers * 4) {  // the barriers of a cluster count every thread
    ptx::barrier_cluster_wait_acquire();
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
    if constexpr (!kInboxApart<C, kSplit>) {
      ptx::barrier_cluster_arrive_release();
      ptx::barrier_cluster_wait_acquire();
    }
  }
}

// ---------------------------------------------------------------- persistent, a tile of full K after the other

inline constexpr int kStoreBuffers = 2;
template <class C>
inline constexpr int kPersistentShared = kPipelineBytes<C> + C::kConsumers * kStoreBuffers * kBoxBytes;

template <class C>
struct TileWalk {
  int tile, step, tiles_m, tiles_n, raster;
  __device__ __forceinline__ explicit TileWalk(const WgmmaParams& p)
      : tile(static_cast<int>(blockIdx.x)), step(static_cast<int>(gridDim.x)), tiles_m(p.tiles_m), tiles_n(p.tiles_n), raster(p.raster) {}
  __device__ __forceinline__ bool more() const { return tile < tiles_m * tiles_n; }
  __device__ __forceinline__ void next() { tile += step; }
  // Groups of `raster` row tiles; within a group the row tile runs first.
  __device__ __forceinline__ void origin(int& m0, int& n0) const {
    const int of_group = raster * tiles_n, group = tile / of_group, rest = tile % of_group;
    const int rows = min(raster, tiles_m - group * raster);
    m0 = (group * raster + rest % rows) * C::kTileM;
    n0 = rest / rows * C::kTileN;
  }
};

template <typename T, class C, bool kWeightOuter>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma_persistent_kernel(const __grid_constant__ WgmmaParams p) {
  static_assert(!C::kSwap && (!kWeightOuter || C::kTileY % 64 == 0));
  extern __shared__ unsigned char shared[];
  const Stages<C> s = set_up_stages<C>(shared, p);
  __syncthreads();
  TileWalk<C> walk(p);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == C::kConsumers * 4) {
    if (threadIdx.x % 32 == 0) {
      ptx::griddepcontrol_wait();
      Pipeline pipeline;
      pipeline.parity = 1;  // stages begin empty
      for (; walk.more(); walk.next()) {
        int m0, n0;
        walk.origin(m0, n0);
        for (int i = 0; i < p.slices; ++i) {
          const int stage = pipeline.stage;
          ptx::mbarrier_wait(s.empty_at(stage), pipeline.parity);
          ptx::mbarrier_arrive_expect_tx(s.full_at(stage), C::kStageBytes);
          copy_slice<C::kTileX, false>(s.x(stage), p.a, m0, i * kSliceK, s.full_at(stage), ptx::kEvictNormal);
          copy_slice<C::kTileY, kWeightOuter>(s.y(stage), p.b, n0, i * kSliceK, s.full_at(stage), ptx::kEvictNormal);
          pipeline.template next<C::kStages>();
        }
      }
      ptx::griddepcontrol_launch_dependents();
    }
    __syncwarp();
  } else {
    const int group = warp / 4, lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t buffers = (s.empty + 8 * C::kStages + 1023) & ~1023u;
    const bool storer = threadIdx.x % 128 == 0;
    Pipeline pipeline;
    float sums[C::kBlocksX][C::kTileY / 2];
    ptx::griddepcontrol_wait();
    for (; walk.more(); walk.next()) {
      int m0, n0;
      walk.origin(m0, n0);
      multiply<T, C, kWeightOuter>(sums, s, pipeline, group, p.slices);
      const int row = warp % 4 * 16;
#pragma unroll
      for (int block = 0; block < C::kBlocksX; ++block) {
        const int m = m0 + (group * C::kBlocksX + block) * 64;
        if (p.bias != nullptr) {
#pragma unroll
          for (int i = 0; i < C::kTileY / 2; ++i) sums[block][i] += bias_at<T>(p.bias, n0 + i / 4 * 8 + lane % 4 * 2 + i % 2, p.n);
        }
        if (p.vector_out) {
#pragma unroll
          for (int chunk = 0; chunk < C::kTileY / 64; ++chunk) {
            const uint32_t buffer = buffers + (group * kStoreBuffers + chunk % kStoreBuffers) * kBoxBytes;
            if (storer) ptx::cp_async_bulk_wait_group_read<kStoreBuffers - 1>();
            named_barrier(1 + group, 128);
            // stmatrix: lane l gives the address of row l % 16 of the 16-byte chunks 2 * i + l / 16.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float* d = &sums[block][(chunk * 64 + i * 16) / 2];
              const int r = row + lane % 16, c = 2 * i + lane / 16;
              const uint32_t address = buffer + r * kRowBytes + ((c ^ (r % 8)) * 16);
              asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(pack2<T>(d[0], d[1])),
                           "r"(pack2<T>(d[2], d[3])), "r"(pack2<T>(d[4], d[5])), "r"(pack2<T>(d[6], d[7]))
                           : "memory");
            }
            ptx::fence_proxy_async();
            named_barrier(1 + group, 128);
            if (storer) {
              ptx::cp_async_bulk_tensor_2d_store(&p.out, n0 + chunk * 64, m, buffer);
              ptx::cp_async_bulk_commit_group();
            }
          }
        }
        // What chunks of 64 columns leave, or everything.
        if (!p.vector_out || C::kTileY % 64 != 0) {
#pragma unroll
          for (int i = 0; i < C::kTileY / 2; ++i) {
            if (p.vector_out && i < C::kTileY / 64 * 32) continue;
            const int r = m + row + lane / 4 + i % 4 / 2 * 8, c = n0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (r < p.m && c < p.n) static_cast<T*>(p.out_data)[r * p.out_stride + c] = static_cast<T>(sums[block][i]);
          }
        }
      }
    }
    if (storer) ptx::cp_async_bulk_wait_group<0>();
  }
}

}  // namespace dandan_gemm
