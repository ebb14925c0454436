// Runs the launchers of this package, without torch and Python, over the edges of their tiles against FP64, then times them.
//
//   kernel_check [check|time|time all|sanitize]     nothing: check, then time; `time all`: every configuration; `sanitize`: a small set in exact
//                                                   allocations, for compute-sanitizer
//   KERNEL=sm80_mma or KERNEL=sm90a_wgmma: that one alone
//
// From the root of the repository:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -cudart static -I packages/dandan-core/src/dandan_ops_core/include
//        -I packages/dandan-attention/csrc packages/dandan-attention/benchmarks/kernel_check.cu packages/dandan-attention/csrc/sm*.cu -o kernel_check
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "configs.h"
#include "mask.cuh"

using namespace dandan_attention;

#define CHECK(x)                                                                                \
  do {                                                                                          \
    const cudaError_t e_ = (x);                                                                 \
    if (e_ != cudaSuccess) {                                                                    \
      printf("CUDA error %s at line %d: %s\n", cudaGetErrorString(e_), __LINE__, #x), exit(1);  \
    }                                                                                           \
  } while (0)

namespace {

__host__ __device__ inline uint32_t hash(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352dU, x ^= x >> 15, x *= 0x846ca68bU, x ^= x >> 16;
  return x;
}
__device__ uint16_t to_bits(float v, bool half) { return half ? __half_as_ushort(__float2half_rn(v)) : __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
__device__ float from_bits(uint16_t v, bool half) { return half ? __half2float(__ushort_as_half(v)) : __bfloat162float(__ushort_as_bfloat16(v)); }

template <typename T>
__global__ void poison(T* p, int64_t count, T value) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) p[i] = value;
}
// Normal numbers times `size`, or all zeros and ones where size is 0.
__global__ void fill(uint16_t* p, int64_t batch, int64_t heads, int64_t rows, int head_dim, Strides s, uint32_t seed, float size, bool half) {
  const int64_t count = batch * heads * rows * head_dim;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t d = i % head_dim, r = i / head_dim % rows, h = i / head_dim / rows % heads, b = i / head_dim / rows / heads;
    const uint32_t a = hash(static_cast<uint32_t>(i) * 2654435761u + seed + static_cast<uint32_t>(i >> 32) * 97u), c = hash(a + 0x9e3779b9u);
    const float normal = sqrtf(-2.f * logf((a + 1.f) * 0x1p-32f)) * cospif(c * 0x1p-31f);
    p[b * s.batch + h * s.head + r * s.row + d] = to_bits(normal * size, half);
  }
}
// NaN and infinities beyond the live length of a sequence.
__global__ void spoil(uint16_t* p, Sequences q, int heads, int head_dim, Strides s, bool half) {
  const int b = blockIdx.y, h = blockIdx.x % heads;
  const Sequence all = [&] {
    Sequences t = q;
    t.seqused_k = nullptr;
    return sequence_at(t, b);
  }();
  const Sequence live = sequence_at(q, b);
  for (int64_t i = threadIdx.x; i < int64_t{all.live - live.live} * head_dim; i += blockDim.x) {
    const int64_t r = all.first_k + live.live + i / head_dim, d = i % head_dim;
    p[(q.cu_seqlens_q == nullptr ? b * s.batch : 0) + h * s.head + r * s.row + d] = hash(static_cast<uint32_t>(i)) % 2 ? 0xffff : half ? 0x7c00 : 0xff80;
  }
}

struct Verdict {
  unsigned bad, guard;
  int batch, head, row, column;
  float got, want, most;  // most: the largest share of the limit that an error took, as bits of a float above 0
};

__device__ double reduce(double v, double* scratch, bool maximum) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const double other = __shfl_xor_sync(0xffffffffu, v, offset);
    v = maximum ? fmax(v, other) : v + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  v = scratch[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) v = maximum ? fmax(v, scratch[w]) : v + scratch[w];
  return v;
}

constexpr int kMostKeys = 16384;
constexpr int kReferenceBytes = kMostKeys * 8;
int reference_bytes(const Params& p) { return static_cast<int>(p.seqlen_k) * 8 + 8; }

// A block a row of out: blockIdx.x = row of a sequence, y = head, z = sequence. The mask is written out, without mask.cuh's ranges.
__global__ void verify(Params p, Sequences sequences, bool half, int row_step, Verdict* verdict) {
  extern __shared__ double weights[];
  __shared__ double scratch[32];
  const bool packed = p.cu_seqlens_q != nullptr;
  const int d_count = p.head_dim;
  for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) for (int h = blockIdx.y; h < p.num_heads_q; h += gridDim.y) {
    const Sequence q = sequence_at(sequences, static_cast<int>(b));
    for (int64_t i = int64_t{blockIdx.x} * row_step; i < q.length_q; i += int64_t{gridDim.x} * row_step) {
      const int64_t bq = packed ? 0 : b;
      const int hk = h / (p.num_heads_q / p.num_heads_kv);
      const uint16_t* const query = static_cast<const uint16_t*>(p.q) + bq * p.q_strides.batch + h * p.q_strides.head + (q.first_q + i) * p.q_strides.row;
      const uint16_t* const keys = static_cast<const uint16_t*>(p.k) + bq * p.k_strides.batch + hk * p.k_strides.head + q.first_k * p.k_strides.row;
      const uint16_t* const values = static_cast<const uint16_t*>(p.v) + bq * p.v_strides.batch + hk * p.v_strides.head + q.first_k * p.v_strides.row;
      double most = -INFINITY;
      __syncthreads();
      for (int j = threadIdx.x; j < q.live; j += blockDim.x) {
        const bool visible = (!p.causal || j <= q.start + i) && (p.window <= 0 || j > q.start + i - sequences.window);
        double s = -INFINITY;
        if (visible) {
          s = 0;
          for (int d = 0; d < d_count; ++d) s += static_cast<double>(from_bits(query[d], half)) * from_bits(keys[j * p.k_strides.row + d], half);
          s *= p.softmax_scale;
          if (p.softcap > 0.f) s = p.softcap * tanh(s / p.softcap);
        }
        weights[j] = s;
        most = fmax(most, s);
      }
      most = reduce(most, scratch, true);
      double sum = 0;
      for (int j = threadIdx.x; j < q.live; j += blockDim.x) {
        weights[j] = weights[j] == -INFINITY ? 0 : exp(weights[j] - most);
        sum += weights[j];
      }
      sum = reduce(sum, scratch, false);
      const auto report = [&](int column, float got, double want, double limit) {
        const double error = fabs(got - want);
        if (error <= limit) {
          if (limit > 0) atomicMax(reinterpret_cast<int*>(&verdict->most), __float_as_int(static_cast<float>(error / limit)));
        } else if (atomicAdd(&verdict->bad, 1) == 0) {
          verdict->batch = static_cast<int>(b), verdict->head = h, verdict->row = static_cast<int>(i), verdict->column = column;
          verdict->got = got, verdict->want = static_cast<float>(want);
        }
      };
      const uint16_t* const out = static_cast<const uint16_t*>(p.out) + bq * p.out_strides.batch + h * p.out_strides.head + (q.first_q + i) * p.out_strides.row;
      for (int d = threadIdx.x; d < d_count; d += blockDim.x) {
        double o = 0, magnitude = 0, small = 0;
        for (int j = 0; j < q.live; ++j) {
          if (weights[j] == 0) continue;
          const double value = from_bits(values[j * p.v_strides.row + d], half), t = weights[j] / sum * value;
          o += t, magnitude += fabs(t);
          if (weights[j] < 0x1p-14) small += fabs(value);
        }
        // P and the result round to the element type, logits and sums are fp32. P is 1 or more for the largest logit; where it is below 2^-14, a half is
        // no longer relative: it is off by up to half of 2^-24.
        const double step = half ? 0x1p-11 : 0x1p-8;
        report(d, from_bits(out[d], half), o,
               sum == 0 ? 0 : (magnitude + fabs(o)) * step * 1.02 + magnitude * 2e-4 + (half ? 0x1p-25 + small / sum * 0x1p-25 : 0));
        if (sum == 0 && out[d] != 0) atomicAdd(&verdict->bad, 1);  // not even -0
      }
      if (p.lse != nullptr && threadIdx.x == 0) {
        const float got = packed ? p.lse[h * p.total_q + q.first_q + i] : p.lse[(b * p.num_heads_q + h) * p.seqlen_q + i];
        if (sum == 0) {
          if (got != -INFINITY) report(-1, got, -1e30, 0);
        } else {
          report(-1, got, most + log(sum), 2e-5 + fabs(most + log(sum)) * 4e-6 + p.softcap * 2e-6);
        }
      }
    }
  }
}
// Everything of out around the rows still holds the poison.
__global__ void guards(const uint16_t* begin, int64_t count, int64_t first, int64_t batch, int64_t heads, int64_t rows, int head_dim, Strides s, uint16_t value,
                       Verdict* v) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    int64_t at = i - first;
    bool inside = at >= 0;
    // Strides fall from the first listed to the last in every layout used here.
    const int64_t outer[3] = {s.batch, s.head > s.row ? s.head : s.row, s.head > s.row ? s.row : s.head};
    const int64_t sizes[3] = {batch, s.head > s.row ? heads : rows, s.head > s.row ? rows : heads};
    for (int k = 0; k < 3 && inside; ++k) {
      const int64_t n = outer[k] == 0 ? 0 : at / outer[k] < sizes[k] ? at / outer[k] : sizes[k] - 1;
      at -= n * outer[k];
    }
    if (!(inside && at < head_dim) && begin[i] != value) atomicAdd(&v->guard, 1);
  }
}
__global__ void differs(const uint16_t* a, const uint16_t* b, int64_t count, Verdict* v) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    if (a[i] != b[i]) atomicAdd(&v->bad, 1);
  }
}

int sms = 0, architecture = 0;
constexpr int64_t kArena = int64_t{1} << 28;  // elements of 16 bits
constexpr int64_t kGuard = 4096;
constexpr int kMaxCases = 20000;
uint16_t *arena_q = nullptr, *arena_k = nullptr, *arena_v = nullptr, *arena_out = nullptr, *arena_out2 = nullptr;
float* arena_lse = nullptr;
int32_t* arena_lengths = nullptr;
Verdict* verdicts = nullptr;
std::vector<std::string> names;
std::vector<int> host_failures;
int used = 0;

uint32_t random_state = 1;
uint32_t rnd(uint32_t n) { return random_state = random_state * 1664525u + 1013904223u, (random_state >> 10) % n; }

struct Kernel {
  const char* name;
  void (*launch)(DType, const Params&, const Launch&);
  int count;
  bool (*available)();
  const char* (*config_name)(int);
  int (*head_dim)(int);
  int (*tile_m)(int);
  int (*tile_n)(int);
  bool (*takes)(int, bool masks);
};
bool chosen(const char* name) {
  const char* const only = getenv("KERNEL");
  return only == nullptr || std::string(only) == name;
}
const Kernel kKernels[] = {
#ifndef NO_SM80
    {"sm80_mma", launch_sm80_mma, kSm80MmaShapeCount, [] { return architecture >= 80 && chosen("sm80_mma"); }, [](int i) { return kSm80MmaShapes[i].name; },
     [](int i) { return kSm80MmaShapes[i].head_dim; }, [](int i) { return kSm80MmaShapes[i].tile_m; }, [](int i) { return kSm80MmaShapes[i].tile_n; },
     [](int, bool) { return true; }},
#endif
    {"sm90a_wgmma", launch_sm90a_wgmma, kSm90aWgmmaShapeCount, [] { return architecture == 90 && chosen("sm90a_wgmma"); },
     [](int i) { return kSm90aWgmmaShapes[i].name; }, [](int i) { return kSm90aWgmmaShapes[i].head_dim; }, [](int i) { return kSm90aWgmmaShapes[i].tile_m; },
     [](int i) { return kSm90aWgmmaShapes[i].tile_n; },
     [](int i, bool masks) { return masks ? kSm90aWgmmaShapes[i].takes_masks : kSm90aWgmmaShapes[i].takes_all; }},
};

struct Form {
  const Kernel* kernel;
  int config;
};
std::vector<Form> all_forms() {
  std::vector<Form> forms;
  for (const Kernel& kernel : kKernels) {
    if (!kernel.available()) continue;
    for (int config = 0; config < kernel.count; ++config) forms.push_back({&kernel, config});
  }
  return forms;
}

enum Layout { kHeadsFirst, kRowsFirst };

Strides strides_of(Layout layout, int heads, int64_t rows, int head_dim, int pad) {
  Strides s;
  if (layout == kHeadsFirst) s.row = head_dim + pad, s.head = s.row * rows, s.batch = s.head * heads;
  else s.head = head_dim + pad, s.row = s.head * heads, s.batch = s.row * rows;
  return s;
}

struct Case {
  Form form;
  DType dtype = DType::kBFloat16;
  int batch = 1, heads_q = 1, heads_kv = 1;
  int seqlen_q = 1, seqlen_k = 1;  // packed: at most, and of one sequence
  bool packed = false, causal = false, seqused = false, starts = false, suffix = false, lse = true, dependent = false, expand = false;
  int64_t window = 0, query_start = 0;
  float softcap = 0.f, size = 1.f, scale = 0.f;  // scale 0: 1 / sqrt(head_dim)
  Layout layout = kHeadsFirst, layout_out = kHeadsFirst;
  int pad = 0, row_step = 1, blocks = 0;  // blocks: instead of the number of multiprocessors
  std::vector<int> lengths_q, lengths_k;  // packed, instead of random ones
};

std::string text_of(const Case& c) {
  char text[400];
  snprintf(text, sizeof text,
           "%s %s D=%d %s batch=%d heads=%d/%d seqlen=%d/%d packed=%d causal=%d window=%ld start=%ld starts=%d suffix=%d seqused=%d softcap=%g scale=%g "
           "size=%g layout=%d/%d pad=%d dependent=%d expand=%d",
           c.form.kernel->name, c.form.kernel->config_name(c.form.config), c.form.kernel->head_dim(c.form.config), dtype_name(c.dtype), c.batch, c.heads_q,
           c.heads_kv, c.seqlen_q, c.seqlen_k, c.packed, c.causal, (long)c.window, (long)c.query_start, c.starts, c.suffix, c.seqused, c.softcap, c.scale,
           c.size, c.layout, c.layout_out, c.pad, c.dependent, c.expand);
  return text;
}

struct Ready {
  Params p;
  Launch l;
  int64_t batch_q = 0, rows_q = 0, rows_k = 0;
};

// The tensors of a case in the arenas. `lengths` says where its integers go.
Ready prepare(const Case& c, int32_t* lengths, uint16_t* q_at, uint16_t* k_at, uint16_t* v_at, uint16_t* out_at, float* lse_at, bool fresh) {
  Ready r;
  Params& p = r.p;
  p.head_dim = c.form.kernel->head_dim(c.form.config);
  std::vector<int32_t> host(4 * (c.batch + 1));
  int32_t *const cu_q = host.data(), *const cu_k = cu_q + c.batch + 1, *const live = cu_k + c.batch + 1, *const starts = live + c.batch + 1;
  for (int b = 0; b < c.batch; ++b) {
    int q = c.seqlen_q, k = c.seqlen_k;
    if (c.packed) {
      if (!c.lengths_q.empty()) q = c.lengths_q[b], k = c.lengths_k[b];
      else if (b != c.batch / 2) q = rnd(4) == 0 ? 0 : rnd(q + 1), k = rnd(5) == 0 ? 0 : rnd(k + 1);
    }
    cu_q[b + 1] = cu_q[b] + q, cu_k[b + 1] = cu_k[b] + k;
    live[b] = rnd(6) == 0 ? (rnd(2) ? 1 << 30 : -5) : static_cast<int>(rnd(k + 2));
    starts[b] = rnd(3) == 0 ? -static_cast<int>(rnd(q + 3)) : static_cast<int>(rnd(k + 20));
  }
  r.batch_q = c.packed ? 1 : c.batch, r.rows_q = c.packed ? cu_q[c.batch] : c.seqlen_q, r.rows_k = c.packed ? cu_k[c.batch] : c.seqlen_k;
  CHECK(cudaMemcpy(lengths, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  if (c.packed) p.cu_seqlens_q = lengths, p.cu_seqlens_k = lengths + c.batch + 1, p.total_q = r.rows_q, p.total_k = r.rows_k;
  if (c.seqused) p.seqused_k = lengths + 2 * (c.batch + 1);
  if (c.starts) p.query_starts = lengths + 3 * (c.batch + 1);
  p.query_start = c.query_start, p.suffix = c.suffix, p.causal = c.causal, p.window = c.window, p.softcap = c.softcap;
  p.softmax_scale = c.scale == 0.f ? 1.f / std::sqrt(static_cast<float>(p.head_dim)) : c.scale;
  p.batch = c.batch, p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k, p.num_heads_q = c.heads_q, p.num_heads_kv = c.heads_kv;
  p.q_strides = strides_of(c.layout, c.heads_q, r.rows_q, p.head_dim, c.pad), p.k_strides = strides_of(c.layout, c.heads_kv, r.rows_k, p.head_dim, c.pad);
  p.v_strides = strides_of(c.layout_out, c.heads_kv, r.rows_k, p.head_dim, c.pad);
  p.out_strides = strides_of(c.layout_out, c.heads_q, r.rows_q, p.head_dim, c.pad);
  if (c.expand) p.k_strides.batch = p.v_strides.batch = 0;
  p.q = q_at, p.k = k_at, p.v = v_at, p.out = out_at, p.lse = c.lse ? lse_at : nullptr;
  const bool half = c.dtype == DType::kHalf;
  const int64_t batch_k = c.expand ? 1 : r.batch_q;
  if (fresh) {
    fill<<<512, 256>>>(q_at, r.batch_q, c.heads_q, r.rows_q, p.head_dim, p.q_strides, used * 7 + 1, c.size, half);
    fill<<<512, 256>>>(k_at, batch_k, c.heads_kv, r.rows_k, p.head_dim, p.k_strides, used * 7 + 2, 1.f, half);
    fill<<<512, 256>>>(v_at, batch_k, c.heads_kv, r.rows_k, p.head_dim, p.v_strides, used * 7 + 3, 1.f, half);
    if (c.seqused && !c.expand) {
      const Sequences s = sequences_of(p);
      spoil<<<dim3(c.heads_kv, c.batch), 128>>>(k_at, s, c.heads_kv, p.head_dim, p.k_strides, half);
      spoil<<<dim3(c.heads_kv, c.batch), 128>>>(v_at, s, c.heads_kv, p.head_dim, p.v_strides, half);
    }
  }
  r.l.config = c.form.config, r.l.sm_count = c.blocks > 0 ? c.blocks : sms, r.l.dependent = c.dependent;
  return r;
}

bool launch(const Case& c, const Ready& r) {
  try {
    c.form.kernel->launch(c.dtype, r.p, r.l);
  } catch (const std::exception& e) {
    printf("LAUNCH FAILED %s: %s\n", text_of(c).c_str(), e.what());
    host_failures.push_back(used);
    return false;
  }
  return true;
}

void run_case(const Case& c) {
  if (used == kMaxCases) printf("more cases than there is room for\n"), exit(1);
  const int64_t batch = c.packed ? 1 : c.batch, rows = (c.packed ? int64_t{c.batch} : 1) * std::max(c.seqlen_q, c.seqlen_k);
  const int64_t most = batch * rows * std::max(c.heads_q, c.heads_kv) * (256 + c.pad) + 2 * kGuard;
  if (most > kArena) printf("%s: too large\n", text_of(c).c_str()), exit(1);
  poison<<<512, 256>>>(arena_q, most, uint16_t{0xffff});
  poison<<<512, 256>>>(arena_k, most, uint16_t{0xffff});
  poison<<<512, 256>>>(arena_v, most, uint16_t{0xffff});
  poison<<<512, 256>>>(arena_out, most, uint16_t{0xabcd});
  const Ready r = prepare(c, arena_lengths, arena_q + kGuard, arena_k + kGuard, arena_v + kGuard, arena_out + kGuard, arena_lse, true);
  names.push_back(text_of(c));
  if (launch(c, r)) {
    verify<<<dim3(std::max(1, std::min(256, c.seqlen_q / c.row_step)), std::min(c.heads_q, 64), std::min(c.batch, 1024)), 128, reference_bytes(r.p)>>>(
        r.p, sequences_of(r.p), c.dtype == DType::kHalf, c.row_step, verdicts + used);
    guards<<<512, 256>>>(arena_out, most, kGuard, r.batch_q, c.heads_q, r.rows_q, r.p.head_dim, r.p.out_strides, 0xabcd, verdicts + used);
  }
  ++used;
}

Case random_case(const Form& form) {
  Case c;
  c.form = form;
  const Kernel& k = *form.kernel;
  const int tm = k.tile_m(form.config), tn = k.tile_n(form.config);
  const auto length = [&](int tile) -> int {
    switch (rnd(6)) {
      case 0: return 1 + rnd(20);
      case 1: return tile - 1 + rnd(3);
      case 2: return 2 * tile - 1 + rnd(3);
      case 3: return 4 * tile - 1 + rnd(3);
      case 4: return tile * (1 + rnd(3));
      default: return 1 + rnd(6 * tile);
    }
  };
  const bool masks = k.takes(form.config, true), all = k.takes(form.config, false);
  c.dtype = static_cast<DType>(rnd(2)), c.heads_kv = 1 + rnd(3), c.heads_q = c.heads_kv * (rnd(4) == 0 ? 8 : 1 + rnd(4));
  c.packed = rnd(2), c.batch = 1 + rnd(c.packed ? 7 : 3), c.seqlen_q = length(tm), c.seqlen_k = rnd(2) ? c.seqlen_q : length(tn);
  if (rnd(15) == 0) c.seqlen_k = 0;
  c.causal = masks && rnd(2), c.window = masks && rnd(3) == 0 ? (rnd(3) == 0 ? 1 + rnd(3) : 1 + rnd(3 * tn)) : 0;
  if (masks && !all && c.window == 0) c.causal = true;
  if (c.window > 0 && rnd(20) == 0) c.window = int64_t{1} << 40;
  c.seqused = rnd(3) == 0, c.lse = rnd(2), c.dependent = rnd(4) == 0, c.expand = !c.packed && c.batch > 1 && !c.seqused && rnd(4) == 0;
  if (rnd(3) == 0) c.suffix = true;
  else if (rnd(3) == 0) c.starts = true;
  else c.query_start = rnd(2) ? c.seqlen_k - c.seqlen_q : rnd(3) == 0 ? (rnd(2) ? 1 : -1) * (int64_t{1} << (20 + rnd(40))) : static_cast<int>(rnd(400)) - 200;
  if (masks && rnd(4) == 0) c.softcap = rnd(2) ? 30.f : 1.f + rnd(5);
  c.size = rnd(3) == 0 ? 5.f : 1.f;
  if (masks && rnd(10) == 0) c.scale = rnd(2) ? -0.1f : 1e-30f;
  c.layout = static_cast<Layout>(rnd(2)), c.layout_out = static_cast<Layout>(rnd(2)), c.pad = 8 * rnd(4) * rnd(2);
  c.blocks = rnd(3) == 0 ? 1 + rnd(7) : 0;
  c.row_step = 1 + static_cast<int>(2e-9 * c.batch * c.heads_q * c.seqlen_q * c.seqlen_k * k.head_dim(form.config));  // rows that are looked at
  return c;
}

void edges() {
  for (const Form& form : all_forms()) {
    for (int i = 0; i < 120; ++i) run_case(random_case(form));
    Case c;
    c.form = form;
    const bool masks = form.kernel->takes(form.config, true);
    c.causal = masks;
    c.heads_q = 8, c.heads_kv = 1, c.batch = 9000, c.seqlen_q = c.seqlen_k = 3, c.row_step = 1;  // more heads than a grid's second dimension
    run_case(c);
    c.packed = true, c.batch = 700, c.seqlen_q = c.seqlen_k = 200, c.heads_q = 2, c.suffix = true;  // more sequences than a table sorts
    run_case(c);
    c.packed = false, c.suffix = false, c.batch = 1, c.heads_q = 4, c.heads_kv = 2, c.seqlen_q = c.seqlen_k = 4096, c.row_step = 37;
    run_case(c);
    if (masks) {
      c.window = 1000, c.softcap = 30.f;
      run_case(c);
    }
  }
  CHECK(cudaDeviceSynchronize());
}

// Batches 2^31 elements apart.
void far_offsets() {
  const int64_t far = (int64_t{1} << 31) + 64;
  uint16_t* all[4] = {};
  for (auto& at : all) {
    if (cudaMalloc(&at, (far + 4000000) * 2) == cudaSuccess) continue;
    cudaGetLastError();
    printf("no memory for batches 2^31 elements apart: not checked\n");
    for (auto& q : all) cudaFree(q);
    return;
  }
  for (const Form& form : all_forms()) {
    Case c;
    c.form = form, c.batch = 2, c.heads_q = 4, c.heads_kv = 2, c.seqlen_q = c.seqlen_k = 300, c.causal = form.kernel->takes(form.config, true);
    Ready r = prepare(c, arena_lengths, all[0], all[1], all[2], all[3], arena_lse, false);
    for (Strides* s : {&r.p.q_strides, &r.p.k_strides, &r.p.v_strides, &r.p.out_strides}) s->batch = far;
    fill<<<512, 256>>>(all[0], 2, 4, 300, r.p.head_dim, r.p.q_strides, 1, 1.f, false);
    fill<<<512, 256>>>(all[1], 2, 2, 300, r.p.head_dim, r.p.k_strides, 2, 1.f, false);
    fill<<<512, 256>>>(all[2], 2, 2, 300, r.p.head_dim, r.p.v_strides, 3, 1.f, false);
    names.push_back("far " + text_of(c));
    if (launch(c, r)) verify<<<dim3(256, 4, 2), 128, reference_bytes(r.p)>>>(r.p, sequences_of(r.p), false, 1, verdicts + used);
    ++used;
  }
  CHECK(cudaDeviceSynchronize());
  for (auto& at : all) CHECK(cudaFree(at));
}

// Again and again, alone and among others, dense and packed, on more and fewer blocks, with programmatic dependent launch: every bit.
void again() {
  for (const Form& form : all_forms()) {
    for (int variant = 0; variant < 6; ++variant) {
      Case c;
      c.form = form;
      const bool masks = form.kernel->takes(form.config, true);
      c.heads_q = 4, c.heads_kv = 2, c.seqlen_q = c.seqlen_k = 777, c.lse = false, c.layout = c.layout_out = kRowsFirst, c.size = variant % 2 ? 4.f : 1.f;
      c.causal = masks && variant < 5, c.window = masks && variant == 2 ? 100 : 0, c.softcap = masks && variant >= 3 ? 20.f : 0.f;
      const Ready alone = prepare(c, arena_lengths, arena_q, arena_k, arena_v, arena_out, nullptr, true);
      names.push_back("again " + text_of(c));
      if (!launch(c, alone)) {
        ++used;
        continue;
      }
      verify<<<dim3(256, 4, 1), 128, reference_bytes(alone.p)>>>(alone.p, sequences_of(alone.p), false, 3, verdicts + used);
      const int64_t size = int64_t{777} * 4 * alone.p.head_dim;
      for (int round = 0; round < 8; ++round) {
        CHECK(cudaMemsetAsync(arena_out2, 0xee, size * 6));
        Case other = c;
        other.packed = round >= 2, other.blocks = round % 3 == 0 ? 5 : 0, other.dependent = round % 2;
        int64_t before_q = 0, before_k = 0;
        if (other.packed) {  // the sequence between others, whose rows stand where they stood
          other.lengths_q = {round * 13, 777, round % 2 ? 1500 : 3}, other.lengths_k = other.lengths_q;
          other.batch = 3, before_q = before_k = round * 13;
          other.seqlen_q = other.seqlen_k = 1500;
        }
        const int64_t d = alone.p.head_dim;
        uint16_t *const q = arena_q + kArena / 2, *const k = arena_k + kArena / 2, *const v = arena_v + kArena / 2;
        Ready r = prepare(other, arena_lengths + 64, q, k, v, arena_out2, nullptr, true);
        CHECK(cudaMemcpyAsync(q + before_q * 4 * d, arena_q, size * 2, cudaMemcpyDeviceToDevice));
        CHECK(cudaMemcpyAsync(k + before_k * 2 * d, arena_k, size, cudaMemcpyDeviceToDevice));
        CHECK(cudaMemcpyAsync(v + before_k * 2 * d, arena_v, size, cudaMemcpyDeviceToDevice));
        if (launch(other, r)) differs<<<256, 256>>>(arena_out2 + before_q * 4 * d, arena_out, size, verdicts + used);
      }
      CHECK(cudaDeviceSynchronize());
      ++used;
    }
  }
}

// Small cases in allocations of their exact size.
void sanitize() {
  for (const Form& form : all_forms()) {
    for (int i = 0; i < 12; ++i) {
      Case c = random_case(form);
      c.seqlen_q = std::min(c.seqlen_q, 300), c.seqlen_k = std::min(c.seqlen_k, 400), c.batch = std::min(c.batch, 3), c.heads_q = c.heads_kv, c.pad = 0;
      c.blocks = 1 + rnd(4);
      const int d = form.kernel->head_dim(form.config);
      const int64_t sequences = c.batch, q_size = sequences * c.seqlen_q * c.heads_q * d, k_size = std::max<int64_t>(1, sequences * c.seqlen_k * c.heads_kv * d);
      uint16_t* at[4];
      float* lse;
      for (int n = 0; n < 4; ++n) CHECK(cudaMalloc(&at[n], 2 * (n == 0 || n == 3 ? q_size : k_size)));
      CHECK(cudaMalloc(&lse, 4 * sequences * c.seqlen_q * c.heads_q));
      const Ready r = prepare(c, arena_lengths, at[0], at[1], at[2], at[3], lse, true);
      names.push_back("sanitize " + text_of(c));
      if (launch(c, r)) verify<<<dim3(64, c.heads_q, c.batch), 128, reference_bytes(r.p)>>>(r.p, sequences_of(r.p), c.dtype == DType::kHalf, 1, verdicts + used);
      CHECK(cudaDeviceSynchronize());
      for (auto* p : at) CHECK(cudaFree(p));
      CHECK(cudaFree(lse));
      ++used;
    }
  }
}

float time_us(const Case& c, const Ready& r) {
  cudaEvent_t e[2];
  CHECK(cudaEventCreate(&e[0]));
  CHECK(cudaEventCreate(&e[1]));
  const auto run = [&](int calls) {
    CHECK(cudaEventRecord(e[0]));
    for (int i = 0; i < calls; ++i) c.form.kernel->launch(c.dtype, r.p, r.l);
    CHECK(cudaEventRecord(e[1]));
    CHECK(cudaEventSynchronize(e[1]));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, e[0], e[1]));
    return ms * 1000.f / calls;
  };
  const float once = std::max(run(1), 1.f);
  const int calls = std::max(2, std::min(200, static_cast<int>(8000.f / once)));
  float us[3];
  for (float& u : us) u = run(calls);
  std::sort(us, us + 3);
  CHECK(cudaEventDestroy(e[0]));
  CHECK(cudaEventDestroy(e[1]));
  return us[1];
}

// TFLOP/s of FlashAttention-3 (varlen) and cuDNN (dense) on an H200, taken in another run: for orientation.
struct Peer {
  int head_dim, heads_q, heads_kv;
  bool causal;
  int fa3[6], cudnn[6];  // S = 512 .. 16384
};
constexpr Peer kPeers[] = {
    {64, 32, 32, false, {260, 327, 433, 473, 520, 532}, {394, 442, 469, 485, 486, 479}},
    {64, 32, 32, true, {147, 223, 337, 411, 486, 517}, {265, 341, 396, 437, 457, 466}},
    {128, 16, 16, false, {393, 545, 655, 700, 726, 708}, {536, 615, 659, 676, 686, 688}},
    {128, 16, 16, true, {255, 394, 520, 622, 680, 714}, {344, 441, 521, 578, 613, 626}},
    {128, 32, 8, false, {420, 575, 678, 717, 712, 695}, {571, 636, 667, 684, 672, 621}},
    {128, 32, 8, true, {254, 419, 551, 654, 707, 705}, {316, 462, 551, 603, 634, 629}},
    {256, 8, 8, false, {365, 559, 718, 773, 808, 813}, {541, 637, 699, 731, 743, 696}},
    {256, 8, 8, true, {206, 361, 587, 697, 762, 803}, {354, 465, 548, 605, 634, 646}},
    {256, 16, 4, false, {405, 680, 746, 782, 807, 734}, {575, 667, 712, 733, 743, 668}},
    {256, 16, 4, true, {237, 527, 654, 737, 785, 811}, {390, 511, 597, 647, 676, 688}},
};

void timings(bool all) {
  constexpr int kTokens = 16384;
  const auto ready = [&](const Case& c) { return prepare(c, arena_lengths, arena_q, arena_k, arena_v, arena_out, arena_lse, false); };
  for (auto* p : {arena_q, arena_k, arena_v}) fill<<<1024, 256>>>(p, 1, 1, kArena / 64, 64, {0, 0, 64}, static_cast<uint32_t>(p - arena_q) + 1, 1.f, false);
  CHECK(cudaDeviceSynchronize());
  const auto best = [&](Case c, bool masks, bool list) {
    float us = 1e30f;
    for (const Form& form : all_forms()) {
      if (form.kernel->head_dim(form.config) != static_cast<int>(c.scale) || !form.kernel->takes(form.config, masks)) continue;
      if (!all && form.kernel != &kKernels[sizeof(kKernels) / sizeof(Kernel) - 1] && architecture == 90 && getenv("KERNEL") == nullptr) continue;
      Case own = c;
      own.form = form, own.scale = 0.f;
      const float t = time_us(own, ready(own));
      if (list) printf(" %s%s %.1f", form.kernel->name[2] == '8' ? "mma " : "", form.kernel->config_name(form.config), t);
      us = std::min(us, t);
    }
    return us;
  };
  printf("bfloat16, %d tokens; per configuration us; then the best in TFLOP/s, its share of the better of FA3 and cuDNN\n", kTokens);
  for (const Peer& peer : kPeers) {
    double product = 1, small = 1;
    for (int i = 0; i < 6; ++i) {
      Case c;
      c.seqlen_q = c.seqlen_k = 512 << i, c.batch = kTokens / c.seqlen_q, c.heads_q = peer.heads_q, c.heads_kv = peer.heads_kv, c.causal = peer.causal;
      c.lse = false, c.scale = static_cast<float>(peer.head_dim);
      printf("D=%d heads %d/%d %s S=%-5d", peer.head_dim, peer.heads_q, peer.heads_kv, peer.causal ? "causal" : "full  ", c.seqlen_q);
      const float us = best(c, peer.causal, true);
      const double flops = 4.0 * c.batch * c.heads_q * c.seqlen_q * c.seqlen_k * peer.head_dim / (peer.causal ? 2 : 1);
      const double tflops = flops / us * 1e-6, share = tflops / std::max(peer.fa3[i], peer.cudnn[i]);
      Case packed = c;
      packed.packed = true;
      packed.lengths_q.assign(c.batch, c.seqlen_q), packed.lengths_k = packed.lengths_q, packed.layout = packed.layout_out = kRowsFirst;
      const float packed_us = best(packed, peer.causal, false);
      printf("  %.0f TF %.3f  (packed %.0f TF, of FA3 %.3f)\n", tflops, share, flops / packed_us * 1e-6, flops / packed_us * 1e-6 / peer.fa3[i]);
      fflush(stdout);
      product *= share;
      if (i < 2) small *= share;
    }
    printf("    geometric mean %.3f, S <= 1024 %.3f\n", std::pow(product, 1 / 6.0), std::sqrt(small));
  }
  for (int head_dim : {64, 128, 256}) {
    Case c;
    c.seqlen_q = c.seqlen_k = 8192, c.batch = 2, c.heads_q = c.heads_kv = head_dim == 64 ? 32 : head_dim == 128 ? 16 : 8, c.causal = true, c.lse = false;
    c.scale = static_cast<float>(head_dim);
    const float plain = best(c, true, false);
    printf("D=%d 2x8192 causal %.1f us", head_dim, plain);
    for (int window : {4096, 1024, 128}) {
      c.window = window;
      printf(", window %d: %.1f", window, best(c, true, false));
    }
    c.window = 0, c.softcap = 30.f;
    const float capped = best(c, true, false);
    printf(", softcap 30: %.1f (%+.1f %%)", capped, (capped / plain - 1) * 100);
    // Lengths from 64 to 8192, evenly in their logarithm, to about 32k tokens.
    Case ragged;
    ragged.packed = true, ragged.causal = true, ragged.lse = false, ragged.heads_q = c.heads_q, ragged.heads_kv = c.heads_kv, ragged.scale = c.scale;
    double flops = 0;
    int total = 0;
    random_state = 7;
    while (total < 32768) {
      const int n = std::min(32768 - total, static_cast<int>(64 * std::exp2(rnd(1000) * 0.007)));
      ragged.lengths_q.push_back(n), total += n, flops += 2.0 * n * n * head_dim * c.heads_q;
    }
    ragged.lengths_k = ragged.lengths_q, ragged.batch = static_cast<int>(ragged.lengths_q.size()), ragged.layout = ragged.layout_out = kRowsFirst;
    ragged.seqlen_q = ragged.seqlen_k = *std::max_element(ragged.lengths_q.begin(), ragged.lengths_q.end());
    const float us = best(ragged, true, false);
    printf("; ragged, %d sequences: %.1f us, %.0f TF\n", ragged.batch, us, flops / us * 1e-6);
  }
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + t.tv_nsec * 1e-9;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  int major = 0, minor = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  architecture = 10 * major + minor;
  CHECK(cudaFuncSetAttribute(verify, cudaFuncAttributeMaxDynamicSharedMemorySize, kReferenceBytes));
  CHECK(cudaMalloc(&verdicts, sizeof(Verdict) * kMaxCases));
  CHECK(cudaMemset(verdicts, 0, sizeof(Verdict) * kMaxCases));
  CHECK(cudaMalloc(&arena_lengths, 1 << 20));
  if (mode != "sanitize") {
    for (auto p : {&arena_q, &arena_k, &arena_v, &arena_out, &arena_out2}) CHECK(cudaMalloc(p, kArena * 2));
    CHECK(cudaMalloc(&arena_lse, 64 << 20));
  }
  if (mode.rfind("time", 0) != 0) {
    const double from = now();
    if (mode == "sanitize") {
      sanitize();
    } else {
      edges(), far_offsets(), again();
    }
    CHECK(cudaDeviceSynchronize());
    std::vector<Verdict> v(used);
    CHECK(cudaMemcpy(v.data(), verdicts, sizeof(Verdict) * used, cudaMemcpyDeviceToHost));
    int failed = 0;
    float most = 0;
    for (int i = 0; i < used; ++i) {
      most = std::max(most, v[i].most);
      const bool host = std::find(host_failures.begin(), host_failures.end(), i) != host_failures.end();
      if (!host && v[i].bad == 0 && v[i].guard == 0) continue;
      if (++failed <= 40) {
        printf("FAILED %s: %s%u wrong, first of them [%d, %d, %d, %d] = %g, not %g; %u guards overwritten\n", names[i].c_str(), host ? "on the host; " : "",
               v[i].bad, v[i].batch, v[i].head, v[i].row, v[i].column, v[i].got, v[i].want, v[i].guard);
      }
    }
    printf("%d cases, %d failed, largest error %.3f of the limit, %.1f s\n", used, failed, most, now() - from);
    fflush(stdout);
    if (failed) return 1;
  }
  if (mode == "" || mode.rfind("time", 0) == 0) timings(argc > 2 && std::string(argv[2]) == "all");
  return 0;
}
