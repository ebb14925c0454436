// Computes   out[m, n] = round(a[m, k] . b + bias): fp32 sums of fp16 or bf16 products, one rounding; or the fp32 sums of each slice of K.
// Tile       kTileM x kTileN of the result a block at a time, kWarpM x kWarpN a warp; a block walks the work items blockIdx.x, + gridDim.x, ..: the
//            tiles of slice 0 of K, then those of slice 1, ..
// Pipeline   kNumStages tiles of K in shared memory, each with a barrier "full" (bytes) and one "empty" (warps). The tile kNumStages - 1 ahead is
//            asked of the copy engine as soon as every warp has left its stage, by the warps in turn:
//              copy      t0 t1 | t2 | t3 | t4 | next item's t0 | t1 |
//              multiply          t0 | t1 | t2 | t3             | t4 | store | t0
//            Fragments of the next 16 k are loaded while those of this 16 k are multiplied, across tiles too; there is no barrier of the block.
//            No warp for the copies alone: registers are shared out over four schedulers, and with a ninth warp each thread could have 168 of them,
//            where a warp tile of 64 x 64 needs over 200 (setmaxnreg, which would move them, is not in sm_90 and sm_120 code).
// Layout     as sm80_mma's; the copy engine exchanges the chunks, and fills with zeros what lies outside a and b. Stores are masked.
// Bound      FLOPs: 2*m*n*k over the rate of mma.sync (about 0.6 of the tensor rate on sm_90, all of it on sm_120); bytes: (m*k + n*k + m*n) * 2.
// Requires   sm_90, rows of a and b at multiples of 16 bytes, sizes below 2^31. No wgmma, no clusters, 99 KB of shared memory: what sm_120 has.
// Selected   routes.h: sm_120.
#pragma once

#include <cuda.h>

#include <dandan/ptx/mbarrier.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/ptx/tma.cuh>

#include "mma_tile.cuh"

namespace dandan_gemm {

struct Sm90TmaMmaParams {
  MmaOutput output;
  bool static_weight;
};

// A walk over the tiles of K of a block's work items.
template <class C>
struct Walk {
  const MmaOutput& o;
  uint32_t item;
  int t, end;  // tiles of K

  __device__ __forceinline__ explicit Walk(const MmaOutput& output) : o(output), item(blockIdx.x) { open(); }
  __device__ __forceinline__ uint32_t tiles() const { return static_cast<uint32_t>(o.tiles_m) * static_cast<uint32_t>(o.tiles_n); }
  __device__ __forceinline__ uint32_t items() const { return tiles() * static_cast<uint32_t>(o.split); }
  __device__ __forceinline__ bool more_items() const { return item < items(); }
  __device__ __forceinline__ bool last_item() const { return items() - item <= gridDim.x; }
  __device__ __forceinline__ int slice() const { return static_cast<int>(item / tiles()); }
  __device__ __forceinline__ TileOrigin origin() const { return origin_of<C>(o, item % tiles()); }
  __device__ __forceinline__ void open() { t = slice_begin(o, slice()), end = slice_begin(o, slice() + 1); }
  __device__ __forceinline__ void next_item() {
    item = last_item() ? items() : item + gridDim.x;
    if (more_items()) open();
  }
};

// The walk of the copies. It stands on a tile, also where slices are empty, or at the end.
template <class C>
struct CopyWalk : Walk<C> {
  int m, n;

  __device__ __forceinline__ explicit CopyWalk(const MmaOutput& output) : Walk<C>(output) { settle(); }
  __device__ __forceinline__ void settle() {
    while (this->more_items() && this->t == this->end) this->next_item();
    if (!this->more_items()) return;
    const TileOrigin origin = this->origin();
    m = static_cast<int>(origin.m), n = static_cast<int>(origin.n);
  }
  __device__ __forceinline__ void next_tile() {
    if (++this->t == this->end) settle();
  }
};

// Stages and barriers as shared addresses, and a place in the ring.
template <class C>
struct Ring {
  uint32_t stages, barriers;
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ explicit Ring(uint32_t shared) : stages((shared + 1023) & ~1023u), barriers(stages + C::kNumStages * C::kStageBytes) {}
  __device__ __forceinline__ uint32_t data() const { return stages + stage * C::kStageBytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers + 16 * stage; }
  __device__ __forceinline__ uint32_t empty() const { return full() + 8; }
  __device__ __forceinline__ void next() {
    if (++stage == C::kNumStages) stage = 0, parity ^= 1;
  }
};

template <typename T, class C, bool kWeightTransposed>
__global__ void __launch_bounds__(C::kWarps * 32, C::kWarps <= 4 ? 2 : 1)
    sm90_tma_mma_gemm_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const Sm90TmaMmaParams p) {
  constexpr int kAhead = C::kNumStages - 1;
  using Warp = WarpTile<T, C, kWeightTransposed>;
  extern __shared__ unsigned char shared[];

  // Set-up.
  const MmaOutput& o = p.output;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  Ring<C> reading(ptx::shared_address(shared)), writing = reading;
  Walk<C> walk(o);
  CopyWalk<C> ahead(o);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&map_a);
    ptx::prefetch_tensormap(&map_b);
    for (Ring<C> ring = reading; ring.parity == 0; ring.next()) {
      ptx::mbarrier_init(ring.full(), 1);
      ptx::mbarrier_init(ring.empty(), C::kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  const auto copy_a = [&](const CopyWalk<C>& at, const Ring<C>& to) {
    ptx::cp_async_bulk_tensor_2d(to.data(), &map_a, at.t * C::kTileK, at.m, to.full(), ptx::kEvictNormal);
  };
  const auto copy_b = [&](const CopyWalk<C>& at, const Ring<C>& to) {
    ptx::mbarrier_arrive_expect_tx(to.full(), C::kStageBytes);
    const int k = at.t * C::kTileK;
    if constexpr (kWeightTransposed) {
      ptx::cp_async_bulk_tensor_2d(to.data() + C::kBytesA, &map_b, k, at.n, to.full(), ptx::kEvictNormal);
    } else {
#pragma unroll
      for (int box = 0; box < C::kTileN / 64; ++box) {
        ptx::cp_async_bulk_tensor_2d(to.data() + C::kBytesA + box * Warp::kPanelBytes, &map_b, at.n + box * 64, k, to.full(), ptx::kEvictNormal);
      }
    }
  };

  // The first tiles. A weight that nothing before this kernel writes is asked for before those kernels have ended.
  const auto first_tiles = [&](bool a, bool b) {
    CopyWalk<C> at = ahead;
    Ring<C> to = writing;
#pragma unroll 1
    for (int i = 0; i < kAhead && at.more_items(); ++i, at.next_tile(), to.next()) {
      if (b) copy_b(at, to);
      if (a) copy_a(at, to);
    }
  };
  if (threadIdx.x == 0 && p.static_weight) first_tiles(false, true);
  ptx::griddepcontrol_wait();
  if (threadIdx.x == 0) first_tiles(true, !p.static_weight);
#pragma unroll 1
  for (int i = 0; i < kAhead && ahead.more_items(); ++i, ahead.next_tile()) writing.next();
  __syncthreads();  // barriers are initialised

  Warp tile(warp, lane);
  typename Warp::Fragments fragments[2];
#pragma unroll 1
  for (; walk.more_items(); walk.next_item()) {
    // Main loop.
    tile.clear();
    if (walk.t < walk.end) {
      ptx::mbarrier_wait(reading.full(), reading.parity);
      tile.load(fragments[0], reading.data(), 0);
    }
#pragma unroll 1
    for (; walk.t < walk.end; ++walk.t) {
#pragma unroll
      for (int step = 0; step < Warp::kSteps; ++step) {
        if (step < Warp::kSteps - 1) {
          tile.load(fragments[(step + 1) % 2], reading.data(), step + 1);
        } else {
          // ldmatrix belongs to another proxy than the copies, and the arrival does not wait for its results: without the fence the copy engine could
          // overwrite what is still to be read (one of 6086 products was wrong on an H200, 2026-12).
          ptx::fence_proxy_async();
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(reading.empty());
          reading.next();
          if (walk.t + 1 < walk.end) {
            ptx::mbarrier_wait(reading.full(), reading.parity);
            tile.load(fragments[0], reading.data(), 0);
          }
        }
        // Half a tile after this warp left the stage, so that the others have most likely left it too.
        if (step == Warp::kSteps / 2 - 1 && ahead.more_items()) {
          if (warp == ahead.t % C::kWarps && lane == 0) {
            ptx::mbarrier_wait(writing.empty(), writing.parity ^ 1);  // the first round finds every stage empty
            copy_b(ahead, writing);
            copy_a(ahead, writing);
          }
          __syncwarp();
          writing.next();
          ahead.next_tile();
        }
        tile.multiply(fragments[step % 2]);
      }
    }

    // Epilogue, from registers: the copies for the next item are on their way.
    if (walk.last_item()) ptx::griddepcontrol_launch_dependents();
    tile.store(o, walk.origin(), walk.slice(), warp, lane);
  }
}

}  // namespace dandan_gemm
