// Computes   the second half of paged decode: the parts of a head of a sequence, weighted by their sums of exponentials, added in the order of the keys.
// Tile       a block a row of out, of every head of every sequence or, where those are many, of those that an end of a stretch may cut: its warps take
//            parts in turn, a lane kHeadDim / 32 columns.
// Pipeline   which parts there are is worked out from the live lengths before the wait: the kernel before started behind its own wait, so whatever
//            wrote the lengths is done. A row that has been written whole ends here.
// Bound      latency; bytes: parts * head_dim * 4, from L2.
// Selected   not built yet: no operator calls it.
#pragma once

#include "sm80_decode_attention.cuh"

namespace dandan_attention {

inline constexpr int kCombineThreads = 128;

template <typename T, class C>
__global__ void __launch_bounds__(kCombineThreads) sm80_decode_combine_kernel(const __grid_constant__ DecodeKernelParams p) {
  constexpr int kWarps = kCombineThreads / 32, kColumns = C::kHeadDim / 32;
  __shared__ float sums[kWarps][C::kHeadDim], weights[kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int row = static_cast<int>(blockIdx.x % static_cast<uint32_t>(p.rows));
  const uint32_t index = blockIdx.x / static_cast<uint32_t>(p.rows), heads_kv = static_cast<uint32_t>(p.schedule.heads_kv);
  int batch = static_cast<int>(index / heads_kv), head = static_cast<int>(index % heads_kv);

  // Parts [first, end). Of all but the first block the part is its first one.
  uint32_t first = index * static_cast<uint32_t>(p.schedule.splits), end = first + static_cast<uint32_t>(p.schedule.splits);
  bool second = false;
  if (p.schedule.splits == 0) {
    const DecodeTotals totals = decode_totals<C::kTileKeys, true>(p.schedule, batch);
    const DecodeStretches stretches(totals.all, static_cast<uint32_t>(p.schedule.parts));
    uint32_t before = totals.before, tiles = 0;
    if (p.by_ends) {
      // The head that the end of stretch `index` cuts. An end beyond the line, or another than a head's first, is nobody's.
      const uint32_t cut = stretches.begin(index + 1), inside = min(cut, totals.all - 1);
      const DecodePlace place = decode_place<C::kTileKeys, true>(p.schedule, inside);
      batch = place.batch, before = place.before;
      tiles = static_cast<uint32_t>(decode_sequence<C::kTileKeys, true>(p.schedule, batch).tiles());
      head = static_cast<int>((inside - before) / tiles);
      if (cut == totals.all || stretches.of(before + head * tiles) != index) tiles = 0;
    } else {
      tiles = static_cast<uint32_t>(decode_sequence<C::kTileKeys, true>(p.schedule, batch).tiles());
    }
    const uint32_t begin = before + head * tiles;
    first = stretches.of(begin), end = tiles == 0 ? first + 1 : stretches.of(begin + tiles - 1) + 1;
    second = begin > stretches.begin(first);
  }
  const bool whole = p.schedule.splits == 0 && end - first == 1;
  if (!whole) {
    const auto place = [&](uint32_t part) {
      const int64_t n = p.schedule.splits != 0 ? int64_t{part} : int64_t{part} * 2 + (part == first && second ? 1 : 0);
      return (n * p.row_tiles + row / C::kWarpM) * C::kWarpM + row % C::kWarpM;
    };
    ptx::griddepcontrol_wait();
    float reference = -INFINITY;
    for (uint32_t part = first + lane; part < end; part += 32) reference = fmaxf(reference, __ldcg(p.part_lse + place(part)));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, offset));
    const float base = fmaxf(reference, -FLT_MAX);

    float sum[kColumns] = {}, total = 0.f;
#pragma unroll 4
    for (uint32_t part = first + warp; part < end; part += kWarps) {
      const int64_t at = place(part);
      const float weight = ptx::ex2_approx_ftz(__ldcg(p.part_lse + at) - base);
      total += weight;
      float v[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        const float2 two = __ldcg(reinterpret_cast<const float2*>(p.part_out + at * C::kHeadDim + c * 32 + lane * 2));
        v[c] = two.x, v[c + 1] = two.y;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] = fmaf(v[c], weight, sum[c]);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[warp][c / 2 * 64 + lane * 2 + c % 2] = sum[c];
    if (lane == 0) weights[warp] = total;
    __syncthreads();
    total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += weights[w];
    const bool empty = total == 0.f;
    const float inverse = empty ? 0.f : 1.f / total;
    int64_t lse_at;
    T* const out = decode_out_row<T>(p, batch, head, row, &lse_at);
    if (thread < C::kHeadDim / 4) {
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 x = *reinterpret_cast<const float4*>(&sums[w][thread * 4]);
        v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
      }
      v.x *= inverse, v.y *= inverse, v.z *= inverse, v.w *= inverse;
      store_four(out + thread * 4, v, p.vector_out);
    }
    if (thread == 0 && p.lse != nullptr) p.lse[lse_at] = empty ? -INFINITY : (reference + log2f(total)) * 0.6931471805599453f;
  } else {
    ptx::griddepcontrol_wait();
  }
  ptx::griddepcontrol_launch_dependents();
}

}  // namespace dandan_attention
