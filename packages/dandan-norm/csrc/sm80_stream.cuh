// Computes   what sm80_row computes, and argmax (first NaN, else lowest index of the maximum), for any width, stride, alignment and weight dtype.
// Tile       blockDim = (threads a row, rows a block); a thread walks the 16-byte vectors t, t + threads, ... of its row, eight at a time. Rows as
//            wide as sm90_cluster's are summed as if by its blocks, one after the other.
// Pipeline   pass 1 over the row: reduce | pass 2: reduce again (layer_norm, softmax) | last pass: read again, scale, store
//            later passes find the row in L1 or L2 unless it is larger.
// Layout     as sm80_row; a vector that is not 16 aligned bytes is gathered element by element and then treated alike.
// Bound      bytes: as sm80_row while the row stays in cache; element-wise gathers are bound by load instructions instead.
// Requires   sm_80; fewer than 2^31 - 2^16 columns. An output may be the input itself: an element is written by the thread that read it, after its row's last reduction.
// Selected   routes.h: rows wider than sm80_row keeps, rows that are not aligned, weights of another dtype.
// Additions  vector k of a thread adds into slot k % 8, slots pairwise, then as in rows.cuh: bit for bit the results of the kernel that the same
//            width takes when it is aligned.
#pragma once

#include "argmax.cuh"
#include "common.cuh"

namespace dandan_norm {

inline constexpr int kStreamSlots = 8;  // partial sums of a thread, and vectors it loads at a time
inline constexpr int kStreamBatch = 4;  // the same in the last pass, which has no sums
inline constexpr int kStreamFoldWarps = 8;  // of a block, at most, where rows are folded

// One tensor's row, a vector at a time: 16 aligned bytes, or elements gathered into the same 16 bytes.
template <typename T, bool kVectorized>
struct StreamRow {
  T* data;
  int cols;
  int64_t stride;
  __device__ __forceinline__ StreamRow(const Params& p, const Rows& t, int64_t row)
      : data(static_cast<T*>(t.data) + tile::row_offset(p.space, t.strides, row)), cols(static_cast<int>(p.cols)), stride(t.strides.element) {}
  // Vector i; `filler` past the row.
  __device__ __forceinline__ uint4 load(int i, uint4 filler) const {
    if constexpr (kVectorized) {
      return ptx::ld_global_v4_if(i * static_cast<int64_t>(kPerVector<T>) < cols, data + static_cast<int64_t>(i) * kPerVector<T>, filler);
    } else {
      return tile::gather_vector<T>(data, i, cols, stride, filler);
    }
  }
  __device__ __forceinline__ void store(int i, const uint4& v) const {
    if constexpr (kVectorized) {
      ptx::st_global_v4(data + static_cast<int64_t>(i) * kPerVector<T>, v);
    } else {
      tile::scatter_vector<T>(data, i, cols, stride, v);
    }
  }
};

template <typename W, int kV>
__device__ __forceinline__ void load_elements(const Affine& a, int i, int cols, float absent, float (&f)[kV]) {
#pragma unroll
  for (int e = 0; e < kV; ++e) f[e] = i * kV + e < cols ? tile::to_float(static_cast<const W*>(a.data)[(i * kV + e) * a.stride]) : absent;
}

// Elements of vector `i` of a weight row as fp32, whatever its dtype; `absent` where there is none.
template <int kV>
__device__ __forceinline__ void load_affine_any(const Affine& a, int i, int cols, float absent, float (&f)[kV]) {
  if (a.data == nullptr) {
#pragma unroll
    for (int e = 0; e < kV; ++e) f[e] = absent;
  } else if (a.dtype == DType::kFloat) {
    load_elements<float>(a, i, cols, absent, f);
  } else if (a.dtype == DType::kHalf) {
    load_elements<__half>(a, i, cols, absent, f);
  } else {
    load_elements<__nv_bfloat16>(a, i, cols, absent, f);
  }
}

// Calls body(row) for the rows of this block, every thread the same number of times; rows past the end are -1. Reductions alternate the halves
// of their scratch from row to row.
template <typename Body>
__device__ __forceinline__ void for_rows(const Params& p, Body&& body) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.y; base < p.space.rows; base += step) {
    const int64_t row = base + threadIdx.y;
    body(row < p.space.rows ? row : -1);
  }
}

// Calls body(slot, i, v) for the vectors i = first, first + step, ... of a row, kBatch at a time: their loads come first, and slot is a constant in
// each call.
template <typename T, int kBatch, bool kVectorized, typename Body>
__device__ __forceinline__ void for_vectors(const StreamRow<T, kVectorized>& row, int first, int step, uint4 filler, Body&& body) {
  const int vectors = (row.cols + kPerVector<T> - 1) / kPerVector<T>;
#pragma unroll 1
  for (; first < vectors; first += step * kBatch) {
    uint4 v[kBatch];
#pragma unroll
    for (int slot = 0; slot < kBatch; ++slot) v[slot] = row.load(first + slot * step, filler);
#pragma unroll
    for (int slot = 0; slot < kBatch; ++slot) {
      if (first + slot * step < vectors) body(slot, first + slot * step, v[slot]);
    }
  }
}

// Folded rows: the halves are used in turn, as in tile::ReduceScratch.
template <typename V, int kValues>
struct StreamFoldScratch {
  V values[2][kValues][32 * kStreamFoldWarps];
};

template <typename V, int kSums>
__device__ __forceinline__ void add_lanes(const V (&lane)[kSums], V (&sums)[kSums], tile::ReduceScratch<V, kSums>& scratch, int half) {
  V in[kSums][1];
#pragma unroll
  for (int n = 0; n < kSums; ++n) in[n][0] = lane[n];
  tile::row_reduce<tile::Sum>(in, sums, scratch, half);
}
template <typename V, int kSums>
__device__ __forceinline__ void add_lanes(const V (&lane)[kSums], V (&sums)[kSums], StreamFoldScratch<V, kSums>& scratch, int half) {
#pragma unroll
  for (int n = 0; n < kSums; ++n) sums[n] = lane[n];
  fold_warps<kStreamFoldWarps>(sums, scratch.values[half], static_cast<int>(threadIdx.y * blockDim.x), static_cast<int>(threadIdx.x),
                               static_cast<int>(blockDim.x >> 5));
}

// Sums over a row: body(i, v, sums) gives the kSums sums of vector i. `turn` counts the reductions of the kernel.
template <typename T, int kSums, bool kVectorized, typename Scratch, typename Body>
__device__ __forceinline__ void row_sums(Accumulator<T> (&total)[kSums], const StreamRow<T, kVectorized>& row, bool live, int blocks, Scratch& scratch,
                                         int& turn, Body&& body) {
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    Accumulator<T> partial[kSums][kStreamSlots] = {};
    if (live) {
      for_vectors<T, kStreamSlots>(row, block * threads + static_cast<int>(threadIdx.x), blocks * threads, make_uint4(0, 0, 0, 0),
                                   [&](int slot, int i, const uint4& v) {
                                     Accumulator<T> sums[kSums];
                                     body(i, v, sums);
#pragma unroll
                                     for (int n = 0; n < kSums; ++n) partial[n][slot] = tile::Sum::apply(partial[n][slot], sums[n]);
                                   });
    }
    Accumulator<T> lane[kSums], sums[kSums];
#pragma unroll
    for (int n = 0; n < kSums; ++n) lane[n] = slot_sum(partial[n]);
    add_lanes(lane, sums, scratch, turn++ & 1);
#pragma unroll
    for (int n = 0; n < kSums; ++n) total[n] = block == 0 ? sums[n] : tile::Sum::apply(total[n], sums[n]);
  }
}

// How many of vector i's elements lie in the row.
template <int kV>
__device__ __forceinline__ int elements_in_row(int i, int cols) {
  const int left = cols - i * kV;
  return left >= kV ? kV : left;
}

struct StreamParams {
  Params p;
  int blocks;  // of the cluster whose order of additions is kept
};

template <typename T, bool kResidual, bool kVectorized>
__global__ void __maxnreg__(64) sm80_stream_rms_kernel(const __grid_constant__ StreamParams s) {
  constexpr int kV = kPerVector<T>;
  __shared__ tile::ReduceScratch<Accumulator<T>, 1> scratch;
  const Params& p = s.p;
  const int cols = static_cast<int>(p.cols);
  const float inverse_cols = 1.f / static_cast<float>(cols);
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  int turn = 0;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  for_rows(p, [&](int64_t row) {
    const bool live = row >= 0;
    const StreamRow<T, kVectorized> x(p, p.x, live ? row : 0);
    const StreamRow<T, kVectorized> residual(p, kResidual ? p.other : p.x, live ? row : 0);
    const StreamRow<T, kVectorized> summed(p, kResidual ? p.second : p.x, live ? row : 0);
    Accumulator<T> sum[1];
    row_sums<T>(sum, x, live, s.blocks, scratch, turn, [&](int i, const uint4& v, Accumulator<T>(&sums)[1]) {
      float f[kV];
      tile::unpack<T>(v, f);
      if constexpr (kResidual) {
        float g[kV];
        tile::unpack<T>(residual.load(i, make_uint4(0, 0, 0, 0)), g);
#pragma unroll
        for (int e = 0; e < kV; ++e) f[e] = __fadd_rn(f[e], g[e]);
        const uint4 rounded = tile::pack<T>(f);
        summed.store(i, rounded);
        tile::unpack<T>(rounded, f);
      }
      sums[0] = vector_sum_squares(f);
    });
    const float scale = inverse_sqrt<T>(__fmaf_rn(static_cast<float>(sum[0]), inverse_cols, p.eps));
    if (!live) return;
    // The vectors that this thread reads again here it has stored itself only where the row was summed by one block.
    if (kResidual && s.blocks > 1) __syncthreads();
    const StreamRow<T, kVectorized> out(p, p.out, row);
    for_vectors<T, kStreamBatch>(summed, first, step, make_uint4(0, 0, 0, 0), [&](int, int i, const uint4& v) {
      float f[kV], g[kV];
      tile::unpack<T>(v, f);
      load_affine_any<kV>(p.weight, i, cols, 1.f, g);
#pragma unroll
      for (int e = 0; e < kV; ++e) f[e] = __fmul_rn(__fmul_rn(f[e], scale), g[e]);
      out.store(i, tile::pack<T>(f));
    });
  });
}

template <bool kFolded, typename V, int kSums>
using StreamScratch = std::conditional_t<kFolded, StreamFoldScratch<V, kSums>, tile::ReduceScratch<V, kSums>>;

template <typename T, bool kVectorized, bool kFolded>
__global__ void __maxnreg__(64) sm80_stream_layer_norm_kernel(const __grid_constant__ StreamParams s) {
  constexpr int kV = kPerVector<T>;
  constexpr bool kExact = sizeof(T) == 4;
  __shared__ StreamScratch<kFolded, Accumulator<T>, 1> mean_scratch;
  __shared__ StreamScratch<kFolded, Accumulator<T>, kExact ? 2 : 1> moment_scratch;
  const Params& p = s.p;
  const int cols = static_cast<int>(p.cols);
  const float inverse_cols = 1.f / static_cast<float>(cols);
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  int mean_turn = 0, moment_turn = 0;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  for_rows(p, [&](int64_t row) {
    const bool live = row >= 0;
    const StreamRow<T, kVectorized> x(p, p.x, live ? row : 0);
    Accumulator<T> sum[1];
    row_sums<T>(sum, x, live, s.blocks, mean_scratch, mean_turn, [&](int, const uint4& v, Accumulator<T>(&sums)[1]) {
      float f[kV];
      tile::unpack<T>(v, f);
      sums[0] = vector_sum(f);
    });
    const float mean = mean_of(sum[0], inverse_cols);

    Accumulator<T> moments[kExact ? 2 : 1];
    row_sums<T>(moments, x, live, s.blocks, moment_scratch, moment_turn, [&](int i, const uint4& v, Accumulator<T>(&sums)[kExact ? 2 : 1]) {
      float f[kV];
      tile::unpack<T>(v, f);
      const int count = elements_in_row<kV>(i, cols);
#pragma unroll
      for (int e = 0; e < kV; ++e) f[e] = e < count ? __fsub_rn(f[e], mean) : 0.f;
      sums[0] = vector_sum_squares(f);
      if constexpr (kExact) sums[1] = vector_sum(f);
    });
    const Centre<T> centre(mean, moments, inverse_cols);
    const float scale = inverse_sqrt<T>(__fadd_rn(centre.variance, p.eps));
    if (!live) return;
    const StreamRow<T, kVectorized> out(p, p.out, row);
    for_vectors<T, kStreamBatch>(x, first, step, make_uint4(0, 0, 0, 0), [&](int, int i, const uint4& v) {
      float f[kV], g[kV], h[kV];
      tile::unpack<T>(v, f);
      load_affine_any<kV>(p.weight, i, cols, 1.f, g);
      load_affine_any<kV>(p.bias, i, cols, 0.f, h);
#pragma unroll
      for (int e = 0; e < kV; ++e) f[e] = __fmaf_rn(__fmul_rn(centre(f[e]), scale), g[e], h[e]);
      out.store(i, tile::pack<T>(f));
    });
  });
}

template <typename T, bool kVectorized>
__global__ void __maxnreg__(64) sm80_stream_softmax_kernel(const __grid_constant__ StreamParams s) {
  constexpr int kV = kPerVector<T>;
  __shared__ tile::ReduceScratch<float, 1> max_scratch;
  __shared__ tile::ReduceScratch<Accumulator<T>, 1> sum_scratch;
  const Params& p = s.p;
  const int cols = static_cast<int>(p.cols);
  const uint4 lowest = tile::splat<T>(-INFINITY);
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  int max_turn = 0, sum_turn = 0;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  for_rows(p, [&](int64_t row) {
    const bool live = row >= 0;
    const StreamRow<T, kVectorized> x(p, p.x, live ? row : 0);
    float largest[1][1] = {{-INFINITY}}, max[1];
    if (live) {
      for_vectors<T, kStreamSlots>(x, first, step, lowest,
                                   [&](int, int, const uint4& v) { largest[0][0] = tile::Max::apply(largest[0][0], tile::vector_max<T>(v)); });
    }
    tile::row_reduce<tile::Max>(largest, max, max_scratch, max_turn++ & 1);
    const Exp<T> exponential(max[0]);
    Accumulator<T> sum[1];
    row_sums<T>(sum, x, live, s.blocks, sum_scratch, sum_turn, [&](int i, const uint4& v, Accumulator<T>(&sums)[1]) {
      float f[kV];
      tile::unpack<T>(v, f);
      const int count = elements_in_row<kV>(i, cols);
#pragma unroll
      for (int e = 0; e < kV; ++e) f[e] = e < count ? exponential(f[e]) : 0.f;
      sums[0] = exponential_sum<T>(f);
    });
    const Quotient<T> over_sum(static_cast<float>(sum[0]));
    if (!live) return;
    const StreamRow<T, kVectorized> out(p, p.out, row);
    for_vectors<T, kStreamBatch>(x, first, step, lowest, [&](int, int i, const uint4& v) {
      float f[kV];
      tile::unpack<T>(v, f);
#pragma unroll
      for (int e = 0; e < kV; ++e) f[e] = over_sum(exponential(f[e]));
      out.store(i, tile::pack<T>(f));
    });
  });
}

template <typename T, bool kVectorized>
__global__ void __maxnreg__(64) sm80_stream_argmax_kernel(const __grid_constant__ StreamParams s) {
  __shared__ tile::KeyScratch scratch;
  const Params& p = s.p;
  int turn = 0;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  for_rows(p, [&](int64_t row) {
    const bool live = row >= 0;
    const StreamRow<T, kVectorized> x(p, p.x, live ? row : 0);
    ArgmaxCandidate<T> best(threadIdx.x);
    if (live) {
      for_vectors<T, kStreamSlots>(x, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), tile::splat<T>(-INFINITY),
                                   [&](int, int i, const uint4& v) { best.offer(v, static_cast<uint32_t>(i)); });
    }
    const uint64_t key = tile::row_reduce_max(live ? best.key((x.cols + kPerVector<T> - 1) / kPerVector<T>) : 0, scratch, turn++ & 1);
    if (live && threadIdx.x == 0) {
      static_cast<int64_t*>(p.out.data)[tile::row_offset(p.space, p.out.strides, row)] = index_of(key);
    }
  });
}

}  // namespace dandan_norm
