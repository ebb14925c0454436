// Which keys a block of paged decode takes, from the live lengths on the device. Shared by the kernel that reads keys and the one that adds its parts.
//
// The line of work: sequence after sequence, of each a head of k after another, of each its tiles of keys; at least one tile, so that the row of an empty
// sequence is written as well. Balanced: block c of `parts` takes an equal stretch of the line,
//
//   line     | b0 h0: t0 t1 t2 | b0 h1: t0 t1 t2 | b1 h0: t0 | b1 h1: t0 |
//   blocks   |    0      |      1      |      2         ..               |      a head of a sequence within one stretch is written at once; the parts of
//                                                                             another go to the workspace: at most two of a block, its first and its last
// With `splits` the tiles of each head of each sequence are divided into that many parts, a block a part.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mask.cuh"

namespace dandan_attention {

struct DecodeSchedule {
  const int32_t* seqused_k;
  int64_t window;  // 0: none
  int capacity;    // keys of a row of the table
  int batch, heads_kv, seqlen_q;
  int parts;       // balanced: stretches of the line
  int splits;      // 0: balanced
};

// Of a sequence: keys [begin, live) are seen by one query or another, tiles [first, end).
struct DecodeSequence {
  int begin, live, first, end;
  __device__ __forceinline__ int tiles() const { return end - first; }
};

// kPastL1: for a kernel that may start before its multiprocessor forgets what older kernels read.
template <int kTileN, bool kPastL1 = false>
__device__ __forceinline__ DecodeSequence decode_sequence(const DecodeSchedule& s, int b) {
  const int live = clamp_to(kPastL1 ? __ldcg(s.seqused_k + b) : s.seqused_k[b], 0, s.capacity);
  const int begin = s.window > 0 ? clamp_to(int64_t{live} - s.seqlen_q + 1 - s.window, 0, live) : 0;
  const int first = begin / kTileN, end = (live + kTileN - 1) / kTileN;
  return {begin, live, first, max(end, first + 1)};
}

// The stretches of a line of `total` tiles: the first `more` are a tile longer.
struct DecodeStretches {
  uint32_t each, more;
  __device__ __forceinline__ DecodeStretches(uint32_t total, uint32_t parts) : each(total / parts), more(total % parts) {}
  __device__ __forceinline__ uint32_t begin(uint32_t part) const { return part * each + min(part, more); }
  __device__ __forceinline__ uint32_t of(uint32_t tile) const {
    const uint32_t longer = more * (each + 1);
    return tile < longer ? tile / (each + 1) : more + (tile - longer) / each;
  }
};

// Tiles of all sequences, and of those before `batch`. All lanes of a warp call it and get it.
struct DecodeTotals {
  uint32_t before, all;
};
template <int kTileN, bool kPastL1 = false>
__device__ __forceinline__ DecodeTotals decode_totals(const DecodeSchedule& s, int batch) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t before = 0, all = 0;
  for (int b = lane; b < s.batch; b += 32) {
    const uint32_t tiles = static_cast<uint32_t>(decode_sequence<kTileN, kPastL1>(s, b).tiles() * s.heads_kv);
    all += tiles;
    before += b < batch ? tiles : 0u;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    all += __shfl_xor_sync(0xffffffffu, all, offset);
    before += __shfl_xor_sync(0xffffffffu, before, offset);
  }
  return {before, all};
}

// The sequence that holds a tile of the line, and the tiles before it. All lanes of a warp call it and get it; the tile is one of the line.
struct DecodePlace {
  int batch;
  uint32_t before;
};
template <int kTileN, bool kPastL1 = false>
__device__ __forceinline__ DecodePlace decode_place(const DecodeSchedule& s, uint32_t tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t before = 0;
  for (int b = 0;; b += 32) {
    const uint32_t own = b + lane < s.batch ? static_cast<uint32_t>(decode_sequence<kTileN, kPastL1>(s, b + lane).tiles() * s.heads_kv) : 0u;
    uint32_t sum = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t left = __shfl_sync(0xffffffffu, sum, max(lane - offset, 0));
      if (lane >= offset) sum += left;
    }
    const uint32_t beyond = __ballot_sync(0xffffffffu, before + sum > tile);
    if (beyond != 0 || b + 32 >= s.batch) {
      const int at = beyond != 0 ? __ffs(static_cast<int>(beyond)) - 1 : 31;
      return {min(b + at, s.batch - 1), before + __shfl_sync(0xffffffffu, sum - own, at)};
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
}

}  // namespace dandan_attention
