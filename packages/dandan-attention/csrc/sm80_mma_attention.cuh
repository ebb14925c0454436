// Computes   out = softmax(logits) . v and the logarithms of the sums, see attention.h; logits and sums in fp32, P rounded to the element type.
// Tile       kTileM rows of q of one head a block, kWarpM (16 or 32) a warp; kTileN keys at a time. blockIdx.x counts tiles of all heads.
// Pipeline   kSlots places in shared memory for tiles of k and v in turn. A place is refilled behind the barrier after its last read:
//              2 slots   k0 | v0, k1 over them | ..            4 slots   k0 v0 | k1 v1 |    one barrier a tile of keys
//              multiply     q.k0 | softmax, P.v0 |                          q.k0, softmax, P.v0 |
//            Of a tile, the exponentials of the next 16 keys lie between the instructions that multiply P of these 16 by v.
//            Softmax is online. A row's reference is its largest logit, kept until a P would exceed 2^8: sums in fp32 and P in the element type have
//            room for that, and most tiles leave the result's registers alone. A row decides for itself: its bits know nothing of its neighbours.
// Layout     q, k, v: panels of 64 columns, in each a row of 128 bytes for every token, 16-byte chunks exchanged (dandan/tile/swizzle.cuh).
//              | q: panel 0 | panel 1 .. | slot 0: panel 0 | panel 1 .. | slot 1 ..
//            S, P and the result stay in registers; P's accumulators are the next instruction's operand as they lie.
// Bound      FLOPs: 4 * head_dim for every visible pair over the rate of mma.sync (about 0.6 of the tensor rate on sm_90); 2^x where head_dim is 64.
// Requires   sm_80. q, k, v: starts and strides at multiples of 16 bytes (the bindings copy others). Rows of out without gaps.
// Selected   routes.h: architectures without wgmma, and by name.
#pragma once

#include <cstdint>

#include <dandan/ptx/cp_async_group.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/ptx/tid.cuh>
#include <dandan/tile/swizzle.cuh>

#include "attention.h"
#include "mask.cuh"
#include "sm80_mma_rows.cuh"

namespace dandan_attention {

// What a warp needs once a tile of keys, or only for tiles with a mask: in shared memory, as the main loop has no register to spare.
struct WarpPlan {
  const char *k, *v;  // of row 0 of the sequence
  TileRange tiles;
  Sequence sequence;
};
static_assert(sizeof(WarpPlan) <= kPlanBytes);

struct Sm80MmaParams {
  const void *q, *k, *v;
  void* out;
  float* lse;
  Strides q_strides, k_strides, v_strides, out_strides;
  Sequences sequences;
  int num_heads_q, group;       // group: heads of q that share a head of k and v
  int64_t q_row, k_row, v_row;  // bytes from a row to the next
  uint32_t pairs, section;      // heads of all sequences, and how many of them run side by side
  uint32_t tiles_m;
  MmaTransform transform;
  float before;     // softcap: 2 * log2(e) * scale / softcap; scale: the scale
  float exponent;   // log2(e) times what a transformed logit still lacks, above 0: P is 2^(exponent * (s - reference))
  bool vector_out;  // rows of out start at multiples of 16 bytes
};

// A thread's part of a tile of rows of kHeadDim elements: a 16-byte chunk of every panel, of every kRowStep-th row. Beyond `rows` there are zeros,
// whatever lies there.
template <int kRows, class C>
__device__ __forceinline__ void copy_tile(uint32_t shared, const char* from, int64_t row_bytes, int rows) {
  constexpr int kRowStep = C::kThreads / 8;
  static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0, "every pass takes whole rows and keeps the swizzle's key");
  const int thread = ptx::tid_x(), row = thread / 8, chunk = thread % 8;
  shared += tile::Swizzle<128>::offset(row, chunk);
  from += row * row_bytes + chunk * 16;
#pragma unroll
  for (int i = 0; i < kRows / kRowStep; ++i) {
    const int bytes = row + i * kRowStep < rows ? 16 : 0;
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
      ptx::cp_async_cg_16_zfill(shared + (p * kRows + i * kRowStep) * 128, from + i * kRowStep * row_bytes + p * 128, bytes);
    }
  }
}

template <typename T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) sm80_mma_attention_kernel(const Sm80MmaParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_q = static_cast<uint32_t>(__cvta_generic_to_shared(shared)), slots = shared_q + C::kBytesQ;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler then knows that a warp takes its branches together

  // Which tile. Sections of heads whose keys and values fit L2 come after another; in one, the last tiles of the queries, which see the most keys and
  // belong to the longest sequences, come first.
  const uint32_t of_section = p.section * p.tiles_m, section = blockIdx.x / of_section, rest = blockIdx.x - section * of_section;
  const uint32_t heads = min(p.section, p.pairs - section * p.section), place = rest / heads;
  const uint32_t pair = section * p.section + rest - place * heads;
  const int batch = static_cast<int>(pair / static_cast<uint32_t>(p.num_heads_q)), head = static_cast<int>(pair % static_cast<uint32_t>(p.num_heads_q));
  const int first_row = static_cast<int>(p.tiles_m - 1 - place) * C::kTileM;

  ptx::griddepcontrol_wait();
  const Sequence sequence = sequence_at(p.sequences, batch);
  const int rows = sequence.length_q - first_row, warp_row = first_row + warp * C::kWarpM, warp_rows = min(C::kWarpM, rows - warp * C::kWarpM);
  if (rows <= 0) return;
  const TileRange tiles = key_tiles<C::kTileN>(p.sequences, sequence, first_row, first_row + min(rows, C::kTileM));
  const auto start = [&](const void* data, const Strides& strides, int at_head, int64_t row) {
    return static_cast<const char*>(data) + (batch * strides.batch + at_head * strides.head + row * strides.row) * 2;
  };
  WarpPlan& plan = *reinterpret_cast<WarpPlan*>(shared + C::kPlansAt + warp * kPlanBytes);
  if (lane == 0) {
    plan.tiles = warp_rows > 0 ? key_tiles<C::kTileN>(p.sequences, sequence, warp_row, warp_row + warp_rows) : TileRange{0, 0, 0, 0};
    plan.sequence = sequence;
    plan.k = start(p.k, p.k_strides, head / p.group, sequence.first_k);
    plan.v = start(p.v, p.v_strides, head / p.group, sequence.first_k);
  }
  __syncwarp();

  const auto copy_keys = [&](uint32_t slot, const char* sequence_start, int64_t row_bytes, int t) {
    if (t < tiles.end) copy_tile<C::kTileN, C>(slot, sequence_start + t * C::kTileN * row_bytes, row_bytes, plan.sequence.live - t * C::kTileN);
  };
  const auto copy_k = [&](uint32_t slot, int t) { copy_keys(slot, plan.k, p.k_row, t); };
  const auto copy_v = [&](uint32_t slot, int t) { copy_keys(slot, plan.v, p.v_row, t); };

  WarpRows<T, C> own_rows(shared_q, warp);
  if (!tiles.empty()) {
    // The first tiles: q and k0 | k0, v0 with three and four slots.
    copy_tile<C::kTileM, C>(shared_q, start(p.q, p.q_strides, head, sequence.first_q + int64_t{first_row}), p.q_row, rows);
    ptx::cp_async_commit_group();
    copy_k(slots, tiles.begin);
    if constexpr (C::kSlots == 3) ptx::cp_async_commit_group();
    if constexpr (C::kSlots >= 3) copy_v(slots + C::kSlotBytes, tiles.begin);
    ptx::cp_async_commit_group();
    if constexpr (C::kQInRegisters) {
      ptx::cp_async_wait_group<C::kSlots == 3 ? 2 : 1>();
      __syncthreads();
      own_rows.load_all_q();
    }
  }

  // Main loop. Every step commits one group, an empty one at the end, so that the same count of younger groups may be on its way.
  constexpr int kYounger = C::kSlots == 3 ? 1 : 0;
  constexpr uint32_t kEnd = C::kSlots * C::kSlotBytes;
  const auto next = [](uint32_t at) { return at + C::kSlotBytes == kEnd ? 0u : at + C::kSlotBytes; };
  uint32_t at_k = 0;
#pragma unroll 1
  for (int t = tiles.begin; t < tiles.end; ++t) {
    const uint32_t at_v = C::kPaired ? at_k + C::kSlotBytes : next(at_k), at_next = C::kPaired ? at_k ^ (2 * C::kSlotBytes) : next(at_v);
    ptx::cp_async_wait_group<kYounger>();
    __syncthreads();  // the tile of k is whole (with four slots that of v too), and nobody reads the slots before it any more
    if constexpr (C::kSlots == 2) copy_v(slots + at_v, t);
    if constexpr (C::kSlots >= 3) copy_k(slots + at_next, t + 1);
    if constexpr (C::kPaired) copy_v(slots + at_next + C::kSlotBytes, t + 1);
    ptx::cp_async_commit_group();
    const TileRange own = plan.tiles;
    const bool active = t >= own.begin && t < own.end;
    if (active) own_rows.multiply_qk(slots + at_k);
    if constexpr (!C::kPaired) {
      ptx::cp_async_wait_group<kYounger>();
      __syncthreads();  // the tile of v is whole, and nobody reads that of k any more
      if constexpr (C::kSlots == 2) copy_k(slots + at_next, t + 1);
      else copy_v(slots + next(at_next), t + 1);
      ptx::cp_async_commit_group();
    }
    if (active) {
      own_rows.apply(p.transform, p.before);
      if (own.masked(t)) own_rows.mask(p.sequences, plan.sequence, warp_row, t * C::kTileN);
      own_rows.update_reference(p.exponent);
      own_rows.multiply_pv(slots + at_v, p.exponent);
    }
    at_k = at_next;
  }
  ptx::griddepcontrol_launch_dependents();

  // Epilogue, from registers.
  if (warp_rows <= 0) return;
  const int64_t row = sequence.first_q + int64_t{warp_row};
  T* const out = static_cast<T*>(p.out) + batch * p.out_strides.batch + head * p.out_strides.head + row * p.out_strides.row;
  float* lse = p.lse;
  if (lse != nullptr) {
    lse += p.sequences.cu_seqlens_q != nullptr ? int64_t{head} * p.sequences.total_q + row : int64_t{pair} * p.sequences.seqlen_q + row;
  }
  own_rows.store(out, p.out_strides.row, lse, warp_rows, p.vector_out);
}

}  // namespace dandan_attention
