// Computes   paged decode: out = softmax(logits) . v for the last queries of each sequence, see decode.h; logits and sums in fp32, P in the element type.
// Tile       the queries of the heads that share a head of k, query after query: kWarpM rows, the same for all warps of a block. A warp takes kWarpN keys
//            of each tile of kWarps * kWarpN, with a ring of kStages places of its own: no barrier of the block before a stretch of keys ends.
// Pipeline   warp     copy n + 2 | multiply n, exponentials, P.v | copy n + 3 | ..        kStages - 1 steps of k and v on their way, across the ends of
//                     sequences too: page ids are read a step before their copies are issued.
//            block    .. end of a head of a sequence: warps merge through shared memory, result to out, or a part to the workspace (decode_schedule.cuh)
//            grid     sm80_decode_combine_kernel adds the parts; it is resident before this one ends.
// Layout     of a warp: | stage 0: k, v | stage 1: k, v | ..; k, v: panels of 64 columns, in each a row of 128 bytes for every key, chunks exchanged
//            (dandan/tile/swizzle.cuh). Between two steps one stage is free: there a warp's result lies while the block merges. q: registers, or shared
//            memory where the result takes them.
// Bound      bytes: 4 * head_dim for each live key of each head of k. Tensor work stays below a third of that time up to 32 rows.
// Requires   sm_80. q, k, v: starts and strides at multiples of 16 bytes.
// Selected   not built yet: no operator calls it.
#pragma once

#include <cfloat>
#include <cstdint>

#include <dandan/ptx/cp_async_group.cuh>
#include <dandan/ptx/global.cuh>
#include <dandan/ptx/math.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/tile/swizzle.cuh>
#include <dandan/tile/vector.cuh>

#include "decode.h"
#include "decode_schedule.cuh"
#include "sm80_mma_rows.cuh"

namespace dandan_attention {

template <int kHeadDim_, int kWarpM_, int kWarpN_, int kWarps_, int kStages_, bool kQInRegisters_, int kBlocks_>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDim_, kWarpM = kWarpM_, kWarpN = kWarpN_, kWarps = kWarps_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kThreads = kWarps * 32, kPanels = kHeadDim / 64, kTileKeys = kWarps * kWarpN;
  static constexpr int kMatrixBytes = kWarpN * kHeadDim * 2, kStageBytes = 2 * kMatrixBytes;
  static constexpr bool kQInRegisters = kQInRegisters_;
  static constexpr int kQAt = kWarps * kStages * kStageBytes, kMasksAt = kQAt + (kQInRegisters ? 0 : kWarpM * kHeadDim * 2);
  static constexpr int kStatsAt = kMasksAt + kWarps * kStages * 4;
  static constexpr int kSharedBytes = kStatsAt + kWarps * kWarpM * 8;
  // What WarpRows asks for: its tile of keys is one warp's part.
  static constexpr int kTileM = kWarpM, kTileN = kWarpN;
  static_assert(kWarpM == 16 || kWarpM == 32);
  static_assert(kWarpN == 16 || kWarpN == 32, "a lane knows of one key, and a mask has 32 bits");
  static_assert(kWarpN >= kWarpM, "a stage holds a warp's result");
  static_assert(kStages >= 2 && kStatsAt % 8 == 0);
};

struct DecodeKernelParams {
  const void *q, *k, *v;
  void* out;
  float* lse;
  float *part_out, *part_lse;  // [part][row tile][kWarpM][kHeadDim], [part][row tile][kWarpM]: logarithms to base 2
  Strides q_strides, out_strides;
  int64_t k_page, k_slot, k_head, v_page, v_slot, v_head;  // bytes
  const int32_t* page_table;
  int64_t table_stride;
  uint32_t num_pages, page_size;
  DecodeSchedule schedule;
  int num_heads_q, group, rows, row_tiles;  // group: heads of q that share a head of k; rows: group * seqlen_q
  MmaTransform transform;
  float before, exponent;  // as in Sm80MmaParams
  bool vector_out;         // rows of out start at multiples of 8 bytes
  bool by_ends;            // the second kernel: a block for each end of a stretch instead of each head of each sequence
};

// A tile of the line.
template <class C>
struct DecodeCursor {
  int batch, head, tile;
  DecodeSequence sequence;

  __device__ __forceinline__ void next(const DecodeSchedule& s) {
    if (++tile < sequence.end) return;
    if (++head == s.heads_kv) {
      head = 0;
      if (++batch == s.batch) return;  // the end of the line
      sequence = decode_sequence<C::kTileKeys>(s, batch);
    }
    tile = sequence.first;
  }
};

__device__ __forceinline__ int64_t shuffle_offset(int64_t v, int lane) {
  const uint32_t low = __shfl_sync(0xffffffffu, static_cast<uint32_t>(v), lane);
  const uint32_t high = __shfl_sync(0xffffffffu, static_cast<uint32_t>(static_cast<uint64_t>(v) >> 32), lane);
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

// The copies of a warp: its keys of one tile after another, page ids a step ahead.
template <class C>
struct DecodeCopies {
  DecodeCursor<C> at;
  uint32_t left, page;  // tiles; page: of this lane's key of the next one, all ones for none

  __device__ __forceinline__ int own_key(int warp, int lane) const { return at.tile * C::kTileKeys + warp * C::kWarpN + lane % C::kWarpN; }

  __device__ __forceinline__ void look_up(const DecodeKernelParams& p, int warp, int lane) {
    page = 0xffffffffu;
    if (left == 0) return;
    const int key = own_key(warp, lane);
    if (key < at.sequence.begin || key >= at.sequence.live) return;
    page = static_cast<uint32_t>(p.page_table[at.batch * p.table_stride + static_cast<uint32_t>(key) / p.page_size]);
  }

  // Where a key is not there, zeros, whatever lies in memory.
  __device__ __forceinline__ void issue(const DecodeKernelParams& p, uint32_t stage, uint32_t& mask, int warp, int lane) {
    if (left != 0) {
      const bool there = page < p.num_pages;  // a negative id is none either
      const uint32_t slot = static_cast<uint32_t>(own_key(warp, lane)) % p.page_size;
      const int64_t id = there ? page : 0;
      const int64_t own_k = id * p.k_page + slot * p.k_slot + at.head * p.k_head, own_v = id * p.v_page + slot * p.v_slot + at.head * p.v_head;
      const uint32_t all = __ballot_sync(0xffffffffu, there);
      if (lane == 0) mask = all;
      const int row = lane / 8, chunk = lane % 8;
#pragma unroll
      for (int i = 0; i < C::kWarpN / 4; ++i) {
        const int r = row + i * 4, bytes = (all >> r & 1) != 0 ? 16 : 0;
        const char* const k = static_cast<const char*>(p.k) + shuffle_offset(own_k, r) + chunk * 16;
        const char* const v = static_cast<const char*>(p.v) + shuffle_offset(own_v, r) + chunk * 16;
        const uint32_t to = stage + tile::Swizzle<128>::offset(r, chunk);
#pragma unroll
        for (int panel = 0; panel < C::kPanels; ++panel) {
          ptx::cp_async_cg_16_zfill(to + panel * C::kWarpN * 128, k + panel * 128, bytes);
          ptx::cp_async_cg_16_zfill(to + C::kMatrixBytes + panel * C::kWarpN * 128, v + panel * 128, bytes);
        }
      }
      --left;
      at.next(p.schedule);
      look_up(p, warp, lane);
    }
    ptx::cp_async_commit_group();
  }
};

// The rows of a warp: q, masks, and the place where a result waits for the others.
template <typename T, class C>
struct DecodeRows : WarpRows<T, C> {
  using Base = WarpRows<T, C>;
  __device__ __forceinline__ explicit DecodeRows(uint32_t shared_q) : Base(shared_q, 0) {}

  // q as the multiplication wants it, straight from global memory.
  __device__ __forceinline__ void load_q_fragments(const DecodeKernelParams& p, const T* q, int first_row, int lane) {
#pragma unroll
    for (int i = 0; i < Base::kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + i * 16 + half * 8 + lane / 4;
        const T* const from = q + row / p.group * p.q_strides.row + row % p.group * p.q_strides.head + lane % 4 * 2;
#pragma unroll
        for (int step = 0; step < Base::kStepsD; ++step) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            this->q[step][i][part * 2 + half] = row < p.rows ? *reinterpret_cast<const uint32_t*>(from + step * 16 + part * 8) : 0u;
          }
        }
      }
    }
  }

  // Or to shared memory, by all threads of the block.
  static __device__ __forceinline__ void copy_q(unsigned char* shared_q, const DecodeKernelParams& p, const T* q, int first_row) {
    constexpr int kChunks = C::kHeadDim / 8;
    for (int i = static_cast<int>(threadIdx.x); i < C::kWarpM * kChunks; i += C::kThreads) {
      const int r = i / kChunks, chunk = i % kChunks, row = first_row + r;
      uint4 v = make_uint4(0u, 0u, 0u, 0u);
      if (row < p.rows) v = ptx::ld_global_v4(q + row / p.group * p.q_strides.row + row % p.group * p.q_strides.head + chunk * 8);
      *reinterpret_cast<uint4*>(shared_q + chunk / 8 * C::kWarpM * 128 + tile::Swizzle<128>::offset(r, chunk % 8)) = v;
    }
    __syncthreads();
  }

  // -inf where a key is not there.
  __device__ __forceinline__ void mask_keys(uint32_t there, int lane) {
    const uint32_t own = there >> (lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < Base::kBlocksN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((own >> (j * 8 + e) & 1) != 0) continue;
#pragma unroll
        for (int i = 0; i < Base::kBlocksM; ++i) this->s[i][j][e] = this->s[i][j][2 + e] = -INFINITY;
      }
    }
  }
  // -inf outside of a query's own range: [own - window, own], `own` the query's key.
  __device__ __forceinline__ void mask_rows(const DecodeKernelParams& p, int live, int first_row, int first_key, int lane) {
#pragma unroll
    for (int i = 0; i < Base::kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + i * 16 + half * 8 + lane / 4;
        const int own = live - p.schedule.seqlen_q + row / p.group, end = own - first_key - lane % 4 * 2;
        const int begin = p.schedule.window > 0 ? clamp_to(end - p.schedule.window, -1, C::kWarpN) : -1;  // keys of the window lie above
#pragma unroll
        for (int j = 0; j < Base::kBlocksN; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (j * 8 + e > end || j * 8 + e <= begin) this->s[i][j][2 * half + e] = -INFINITY;
          }
        }
      }
    }
  }

  // Rows of kHeadDim floats; 16-byte chunk c of row r lies at place c ^ (r % 8).
  static __device__ __forceinline__ int place(int row, int chunk) { return row * C::kHeadDim + (chunk ^ (row & 7)) * 4; }
  __device__ __forceinline__ void leave(float* to, float2* stats, int lane) const {
#pragma unroll
    for (int i = 0; i < Base::kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * 16 + half * 8 + lane / 4;
        const float total = tile::quad_sum(this->sum[i][half]);
        if (lane % 4 == 0) stats[row] = make_float2(this->reference[i][half], total);
#pragma unroll
        for (int j = 0; j < Base::kBlocksD; ++j) {
          *reinterpret_cast<float2*>(to + place(row, j * 2 + lane % 4 / 2) + lane % 2 * 2) =
              make_float2(this->out[i][j][2 * half], this->out[i][j][2 * half + 1]);
        }
      }
    }
  }
};

template <typename T>
__device__ __forceinline__ void store_four(T* to, float4 v, bool vector_out) {
  const uint2 w = make_uint2(tile::pack_pair(v.x, v.y, T{}), tile::pack_pair(v.z, v.w, T{}));
  if (vector_out) {
    *reinterpret_cast<uint2*>(to) = w;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) reinterpret_cast<uint16_t*>(to)[e] = static_cast<uint16_t>((e < 2 ? w.x : w.y) >> (e % 2 * 16));
  }
}

// Where row `row` of the rows of a head of k lies in out, and its place in lse.
template <typename T>
__device__ __forceinline__ T* decode_out_row(const DecodeKernelParams& p, int batch, int head, int row, int64_t* lse_at) {
  const int token = row / p.group, head_q = head * p.group + row % p.group;
  *lse_at = (int64_t{batch} * p.num_heads_q + head_q) * p.schedule.seqlen_q + token;
  return static_cast<T*>(p.out) + batch * p.out_strides.batch + head_q * p.out_strides.head + token * p.out_strides.row;
}

template <typename T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) sm80_decode_attention_kernel(const __grid_constant__ DecodeKernelParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * C::kStages * C::kStageBytes;
  uint32_t* const masks = reinterpret_cast<uint32_t*>(shared + C::kMasksAt) + warp * C::kStages;
  float2* const stats = reinterpret_cast<float2*>(shared + C::kStatsAt);
  // Blocks of the same keys and other rows are neighbours: they run at the same time, and the keys come from DRAM once.
  const uint32_t part = blockIdx.x / static_cast<uint32_t>(p.row_tiles);
  const int row_tile = static_cast<int>(blockIdx.x % static_cast<uint32_t>(p.row_tiles)), first_row = row_tile * C::kWarpM;
  const int rows = min(C::kWarpM, p.rows - first_row);

  ptx::griddepcontrol_wait();
  DecodeCursor<C> at;
  uint32_t left;
  if (p.schedule.splits == 0) {
    const DecodeStretches stretches(decode_totals<C::kTileKeys>(p.schedule, 0).all, static_cast<uint32_t>(p.schedule.parts));
    const uint32_t begin = stretches.begin(part);
    left = stretches.begin(part + 1) - begin;
    if (left == 0) return;
    const DecodePlace place = decode_place<C::kTileKeys>(p.schedule, begin);
    at.batch = place.batch;
    at.sequence = decode_sequence<C::kTileKeys>(p.schedule, at.batch);
    at.head = static_cast<int>((begin - place.before) / static_cast<uint32_t>(at.sequence.tiles()));
    at.tile = at.sequence.first + static_cast<int>((begin - place.before) % static_cast<uint32_t>(at.sequence.tiles()));
  } else {
    const uint32_t splits = static_cast<uint32_t>(p.schedule.splits), pair = part / splits, split = part % splits;
    const uint32_t heads_kv = static_cast<uint32_t>(p.schedule.heads_kv);
    at.batch = static_cast<int>(pair / heads_kv), at.head = static_cast<int>(pair % heads_kv);
    at.sequence = decode_sequence<C::kTileKeys>(p.schedule, at.batch);
    const DecodeStretches stretches(static_cast<uint32_t>(at.sequence.tiles()), splits);
    at.tile = at.sequence.first + static_cast<int>(stretches.begin(split));
    left = stretches.begin(split + 1) - stretches.begin(split);
  }

  DecodeCopies<C> copies{at, left, 0};
  copies.look_up(p, warp, lane);
#pragma unroll
  for (int stage = 0; stage < C::kStages - 1; ++stage) copies.issue(p, ring + stage * C::kStageBytes, masks[stage], warp, lane);

  int stage = 0, free = C::kStages - 1;  // the next step's, and the one before it
  bool leads = true;                     // the block's first head of a sequence
  do {
    // One head of one sequence, or a part of it.
    DecodeRows<T, C> own(static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + C::kQAt);
    const T* const q = static_cast<const T*>(p.q) + at.batch * p.q_strides.batch + int64_t{at.head} * p.group * p.q_strides.head;
    if constexpr (C::kQInRegisters) own.load_q_fragments(p, q, first_row, lane);
    else own.copy_q(shared + C::kQAt, p, q, first_row);
    const bool opens = at.tile == at.sequence.first;
    const int end = min(at.sequence.end - at.tile, static_cast<int>(left)) + at.tile;
    left -= static_cast<uint32_t>(end - at.tile);
    // Keys that every row of the block sees, as far as they are there: up to the first query's own, of the last query's window.
    const int last = at.sequence.live - p.schedule.seqlen_q + first_row / p.group;
    const int first = p.schedule.window > 0
                          ? clamp_to(int64_t{at.sequence.live} - p.schedule.seqlen_q + (first_row + rows - 1) / p.group + 1 - p.schedule.window, 0, 0x7fffffff)
                          : 0;
#pragma unroll 1
    for (int tile = at.tile; tile < end; ++tile) {
      ptx::cp_async_wait_group<C::kStages - 2>();
      __syncwarp();  // this step's keys are whole for all lanes, and none reads those of the step before any more
      copies.issue(p, ring + free * C::kStageBytes, masks[free], warp, lane);
      const uint32_t there = masks[stage], slot = ring + stage * C::kStageBytes;
      if (there != 0) {
        const int first_key = tile * C::kTileKeys + warp * C::kWarpN;
        own.multiply_qk(slot);
        own.apply(p.transform, p.before);
        if (first_key + C::kWarpN - 1 > last || first_key < first) own.mask_rows(p, at.sequence.live, first_row, first_key, lane);
        if (there != 0xffffffffu) own.mask_keys(there, lane);
        own.update_reference(p.exponent);
        own.multiply_pv(slot + C::kMatrixBytes, p.exponent);
      }
      free = stage;
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
    if (left == 0) ptx::griddepcontrol_launch_dependents();

    // Merge: every warp's result in its free stage, sums and references apart.
    __syncwarp();
    own.leave(reinterpret_cast<float*>(shared + (warp * C::kStages + free) * C::kStageBytes), stats + warp * C::kWarpM, lane);
    __syncthreads();
    const bool whole = p.schedule.splits == 0 ? opens && end == at.sequence.end : p.schedule.splits == 1;
    const int64_t place = (p.schedule.splits != 0 ? int64_t{part} : int64_t{part} * 2 + (leads ? 0 : 1)) * p.row_tiles + row_tile;
    for (int i = thread; i < rows * (C::kHeadDim / 4); i += C::kThreads) {
      const int row = i / (C::kHeadDim / 4), chunk = i % (C::kHeadDim / 4);
      float reference = -INFINITY, total = 0.f;
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) reference = fmaxf(reference, stats[w * C::kWarpM + row].x);
      const float base = fmaxf(reference, -FLT_MAX);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) {
        const float2 s = stats[w * C::kWarpM + row];
        const float factor = ptx::ex2_approx_ftz(s.x - base);
        const float4 v =
            *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(shared + (w * C::kStages + free) * C::kStageBytes) + own.place(row, chunk));
        total = fmaf(s.y, factor, total);
        sum.x = fmaf(v.x, factor, sum.x), sum.y = fmaf(v.y, factor, sum.y), sum.z = fmaf(v.z, factor, sum.z), sum.w = fmaf(v.w, factor, sum.w);
      }
      const bool empty = total == 0.f;
      const float inverse = empty ? 0.f : 1.f / total, log2_sum = empty ? -INFINITY : reference + log2f(total);
      sum.x *= inverse, sum.y *= inverse, sum.z *= inverse, sum.w *= inverse;
      if (whole) {
        int64_t lse_at;
        T* const out = decode_out_row<T>(p, at.batch, at.head, first_row + row, &lse_at);
        store_four(out + chunk * 4, sum, p.vector_out);
        if (chunk == 0 && p.lse != nullptr) p.lse[lse_at] = log2_sum * 0.6931471805599453f;
      } else {
        *reinterpret_cast<float4*>(p.part_out + (place * C::kWarpM + row) * C::kHeadDim + chunk * 4) = sum;
        if (chunk == 0) p.part_lse[place * C::kWarpM + row] = log2_sum;
      }
    }
    __syncthreads();  // the free stages may be filled again
    leads = false;
    at.tile = end - 1;
    at.next(p.schedule);
  } while (left != 0);
}

}  // namespace dandan_attention
