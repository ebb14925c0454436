// Where a sequence lies and which of its keys a query sees: the arithmetic of attention.h's rule, shared by the kernels. For host and device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention.h"

namespace dandan_attention {

// The part of Params that says where sequences lie and what is masked, small enough for a kernel's parameters.
struct Sequences {
  const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_k, *query_starts;
  int64_t query_start, window;  // window 0: none
  int batch, seqlen_q, seqlen_k, total_q, total_k;
  bool suffix, causal;
};

inline Sequences sequences_of(const Params& p) {
  // Beyond these a start or a window shows no key more and none less, and sums of them do not overflow.
  constexpr int64_t kFar = int64_t{1} << 33;
  const auto near = [](int64_t v) { return v < -kFar ? -kFar : v > kFar ? kFar : v; };
  return {p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_k, p.query_starts, near(p.query_start), near(p.window), static_cast<int>(p.batch),
          static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), static_cast<int>(p.total_q), static_cast<int>(p.total_k), p.suffix, p.causal};
}

struct Sequence {
  int first_q, first_k;  // packed: rows before the sequence; dense: 0
  int length_q, live;    // queries; keys that count
  int64_t start;         // position of query 0 among the keys
};

__host__ __device__ __forceinline__ int clamp_to(int64_t v, int low, int high) {
  return v < low ? low : v > high ? high : static_cast<int>(v);
}

// Values on the device that are not lengths at all (negative, descending, beyond the end) give an empty or a shorter sequence.
__host__ __device__ __forceinline__ Sequence sequence_at(const Sequences& s, int b) {
  Sequence r = {0, 0, s.seqlen_q, s.seqlen_k, s.query_start};
  if (s.cu_seqlens_q != nullptr) {
    r.first_q = clamp_to(s.cu_seqlens_q[b], 0, s.total_q);
    r.length_q = clamp_to(s.cu_seqlens_q[b + 1], r.first_q, s.total_q) - r.first_q;
    r.first_k = clamp_to(s.cu_seqlens_k[b], 0, s.total_k);
    r.live = clamp_to(s.cu_seqlens_k[b + 1], r.first_k, s.total_k) - r.first_k;
  }
  if (s.seqused_k != nullptr) r.live = clamp_to(s.seqused_k[b], 0, r.live);
  if (s.suffix) r.start = int64_t{r.live} - r.length_q;
  else if (s.query_starts != nullptr) r.start = s.query_starts[b];
  return r;
}

struct KeyRange {
  int begin, end;  // keys [begin, end); nothing where end <= begin
};

// The keys that query `row` sees. Neither bound falls from a row to the next, so rows [r0, r1) see nothing outside of [begin of r0, end of r1 - 1), and
// all of them see [begin of r1 - 1, end of r0).
__host__ __device__ __forceinline__ KeyRange visible_keys(const Sequences& s, const Sequence& q, int row) {
  const int64_t own = q.start + row;
  return {s.window > 0 ? clamp_to(own - s.window + 1, 0, q.live) : 0, s.causal ? clamp_to(own + 1, 0, q.live) : q.live};
}

// The tiles of keys [begin, end) that rows [r0, r1) of a tile of queries need; in [full_begin, full_end) every row sees every key.
struct TileRange {
  int begin, end, full_begin, full_end;
  __host__ __device__ __forceinline__ bool empty() const { return end <= begin; }
  __host__ __device__ __forceinline__ bool masked(int tile) const { return tile < full_begin || tile >= full_end; }
};

template <int kTileN>
__host__ __device__ __forceinline__ TileRange key_tiles(const Sequences& s, const Sequence& q, int r0, int r1) {
  const KeyRange first = visible_keys(s, q, r0), last = visible_keys(s, q, r1 - 1);
  TileRange t = {first.begin / kTileN, (last.end + kTileN - 1) / kTileN, (last.begin + kTileN - 1) / kTileN, first.end / kTileN};
  if (last.end <= first.begin) t.end = t.begin;
  return t;
}

}  // namespace dandan_attention
