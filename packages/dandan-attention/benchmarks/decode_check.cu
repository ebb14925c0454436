// Runs paged decode, without torch and Python, against FP64, then times it.
//
//   decode_check [check|time|time all|sanitize]     nothing: check, then time; `time all`: pages of 16 and 256, fixed splits; `sanitize`: a small set in
//                                                   exact allocations, for compute-sanitizer
//   CONFIG=3: that configuration alone (a place in decode/decode_configs.h)
//
// From the root of the repository:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -cudart static -I packages/dandan-core/src/dandan_ops_core/include
//        -I packages/dandan-attention/csrc packages/dandan-attention/benchmarks/decode_check.cu packages/dandan-attention/csrc/decode/*.cu -o decode_check
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode/decode.h"
#include "decode/decode_configs.h"

using namespace dandan_attention;

#define CHECK(x)                                                                               \
  do {                                                                                         \
    const cudaError_t e_ = (x);                                                                \
    if (e_ != cudaSuccess) {                                                                   \
      printf("CUDA error %s at line %d: %s\n", cudaGetErrorString(e_), __LINE__, #x), exit(1); \
    }                                                                                          \
  } while (0)

namespace {

__host__ __device__ inline uint32_t hash(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352dU, x ^= x >> 15, x *= 0x846ca68bU, x ^= x >> 16;
  return x;
}
__device__ uint16_t to_bits(float v, bool half) { return half ? __half_as_ushort(__float2half_rn(v)) : __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
__device__ float from_bits(uint16_t v, bool half) { return half ? __half2float(__ushort_as_half(v)) : __bfloat162float(__ushort_as_bfloat16(v)); }
__device__ float normal(uint32_t seed) {
  const uint32_t a = hash(seed), c = hash(a + 0x9e3779b9u);
  return sqrtf(-2.f * logf((a + 1.f) * 0x1p-32f)) * cospif(c * 0x1p-31f);
}
template <typename T>
__global__ void set(T* p, int64_t count, T value) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) p[i] = value;
}
__global__ void fill(uint16_t* p, int64_t count, uint32_t seed, float size, bool half) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    p[i] = to_bits(normal(static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(i >> 32) * 97u + seed) * size, half);
  }
}
__device__ int live_of(const DecodeParams& p, int64_t b) {
  const int64_t capacity = p.max_pages * p.page_size, live = p.seqused_k[b];
  return static_cast<int>(live < 0 ? 0 : live > capacity ? capacity : live);
}
// The row of a key, or -1.
__device__ int64_t row_of(const DecodeParams& p, const PageStrides& s, int64_t b, int j, int head) {
  const int64_t page = p.page_table[b * p.table_stride + j / p.page_size];
  return page < 0 || page >= p.num_pages ? -1 : page * s.page + j % p.page_size * s.slot + head * s.head;
}
// Numbers where live keys lie; everything else keeps its NaN.
__global__ void fill_keys(uint16_t* to, DecodeParams p, PageStrides s, uint32_t seed, float size, bool half) {
  const int64_t b = blockIdx.y;
  for (int64_t i = blockIdx.x; i < int64_t{live_of(p, b)} * p.num_heads_kv; i += gridDim.x) {
    const int64_t row = row_of(p, s, b, static_cast<int>(i / p.num_heads_kv), static_cast<int>(i % p.num_heads_kv));
    for (int d = threadIdx.x; row >= 0 && d < p.head_dim; d += blockDim.x) to[row + d] = to_bits(normal(static_cast<uint32_t>(row + d) + seed) * size, half);
  }
}

struct Verdict {
  unsigned bad, guard;
  int batch, head, row, column;
  float got, want, most;  // most: the largest share of the limit that an error took
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

constexpr int kVerifyBlocks = 512, kMostKeys = 140000;

// A row of out after another; weights: kMostKeys numbers of a block.
__global__ void verify(DecodeParams p, bool half, int64_t step, double* all_weights, Verdict* verdict) {
  __shared__ double scratch[32];
  double* const weights = all_weights + int64_t{blockIdx.x} * kMostKeys;
  const int64_t total = p.batch * p.num_heads_q * p.seqlen_q;
  for (int64_t n = blockIdx.x * step; n < total; n += gridDim.x * step) {
    const int t = static_cast<int>(n % p.seqlen_q), h = static_cast<int>(n / p.seqlen_q % p.num_heads_q);
    const int64_t b = n / p.seqlen_q / p.num_heads_q;
    const int hk = h / (p.num_heads_q / p.num_heads_kv), live = live_of(p, b), own = live - p.seqlen_q + t;
    const uint16_t* const query = static_cast<const uint16_t*>(p.q) + b * p.q_strides.batch + h * p.q_strides.head + t * p.q_strides.row;
    double most = -INFINITY;
    __syncthreads();
    for (int j = threadIdx.x; j < live; j += blockDim.x) {
      const int64_t row = row_of(p, p.k_strides, b, j, hk);
      double s = -INFINITY;
      if (row >= 0 && j <= own && (p.window <= 0 || j > own - p.window)) {
        s = 0;
        for (int d = 0; d < p.head_dim; ++d) s += static_cast<double>(from_bits(query[d], half)) * from_bits(static_cast<const uint16_t*>(p.k)[row + d], half);
        s *= p.softmax_scale;
        if (p.softcap > 0.f) s = p.softcap * tanh(s / p.softcap);
      }
      weights[j] = s;
      most = fmax(most, s);
    }
    most = reduce(most, scratch, true);
    double sum = 0;
    for (int j = threadIdx.x; j < live; j += blockDim.x) {
      weights[j] = weights[j] == -INFINITY ? 0 : exp(weights[j] - most);
      sum += weights[j];
    }
    sum = reduce(sum, scratch, false);
    const auto report = [&](int column, float got, double want, double limit) {
      const double error = fabs(got - want);
      if (error <= limit) {
        if (limit > 0) atomicMax(reinterpret_cast<int*>(&verdict->most), __float_as_int(static_cast<float>(error / limit)));
      } else if (atomicAdd(&verdict->bad, 1) == 0) {
        verdict->batch = static_cast<int>(b), verdict->head = h, verdict->row = t, verdict->column = column;
        verdict->got = got, verdict->want = static_cast<float>(want);
      }
    };
    const uint16_t* const out = static_cast<const uint16_t*>(p.out) + b * p.out_strides.batch + h * p.out_strides.head + t * p.out_strides.row;
    for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
      double o = 0, magnitude = 0, small = 0;
      for (int j = 0; j < live; ++j) {
        if (weights[j] == 0) continue;
        const double value = from_bits(static_cast<const uint16_t*>(p.v)[row_of(p, p.v_strides, b, j, hk) + d], half), x = weights[j] / sum * value;
        o += x, magnitude += fabs(x);
        if (weights[j] < 0x1p-14) small += fabs(value);
      }
      const double unit = half ? 0x1p-11 : 0x1p-8;  // as in kernel_check.cu
      report(d, from_bits(out[d], half), o,
             sum == 0 ? 0 : (magnitude + fabs(o)) * unit * 1.02 + magnitude * 2e-4 + (half ? 0x1p-25 + small / sum * 0x1p-25 : 0));
      if (sum == 0 && out[d] != 0) atomicAdd(&verdict->bad, 1);  // not even -0
    }
    if (p.lse != nullptr && threadIdx.x == 0) {
      const float got = p.lse[n];
      if (sum == 0) {
        if (got != -INFINITY) report(-1, got, -1e30, 0);
      } else {
        report(-1, got, most + log(sum), 2e-5 + fabs(most + log(sum)) * 4e-6 + p.softcap * 2e-6);
      }
    }
  }
}
// A word outside of the rows of out, or in another row of the same bits, that is not what it was.
__global__ void guards(const uint16_t* begin, int64_t count, int64_t first, DecodeParams p, uint16_t value, Verdict* v) {
  const Strides& s = p.out_strides;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    int64_t at = i - first;
    bool inside = at >= 0;
    const bool tokens_first = s.row > s.head;
    const int64_t outer[3] = {s.batch, tokens_first ? s.row : s.head, tokens_first ? s.head : s.row};
    const int64_t sizes[3] = {p.batch, tokens_first ? p.seqlen_q : p.num_heads_q, tokens_first ? p.num_heads_q : p.seqlen_q};
    for (int k = 0; k < 3 && inside; ++k) at -= min(at / outer[k], sizes[k] - 1) * outer[k];
    if (!(inside && at < p.head_dim) && begin[i] != value) atomicAdd(&v->guard, 1);
  }
}
template <typename T>
__global__ void differs(const T* a, const T* b, int64_t count, Verdict* v) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    if (a[i] != b[i]) atomicAdd(&v->bad, 1);
  }
}

int sms = 0, architecture = 0;
constexpr int kMaxCases = 8192;
Verdict* verdicts = nullptr;
double* weights = nullptr;
std::vector<std::string> names;
int host_failures = 0;
bool exact = false;  // allocations without room around

uint32_t random_state = 1;
uint32_t rnd(uint32_t n) { return random_state = random_state * 1664525u + 1013904223u, (random_state >> 10) % n; }

std::vector<int> configs() {
  const char* const only = getenv("CONFIG");
  std::vector<int> all;
  for (int i = 0; i < kSm80DecodeShapeCount; ++i) {
    if (only == nullptr || atoi(only) == i) all.push_back(i);
  }
  return all;
}

struct Case {
  int config = 0;
  DType dtype = DType::kBFloat16;
  int batch = 1, heads_q = 1, heads_kv = 1, seqlen_q = 1, page = 64, most_keys = 64, extra_pages = 0, splits = 0, blocks = 0;
  int64_t window = 0;
  float softcap = 0.f, scale = 0.f, size = 1.f;
  bool heads_first = false, packed = false, holes = false, lse = true, dependent = false, odd_out = false;
  int pad = 0;
  std::vector<int> lengths;  // instead of random ones
};

std::string text_of(const Case& c) {
  char text[400];
  const DecodeShape& s = kSm80DecodeShapes[c.config];
  snprintf(text, sizeof text,
           "%s D=%d %s batch=%d heads=%d/%d seqlen_q=%d page=%d keys<=%d extra=%d splits=%d sms=%d window=%ld softcap=%g scale=%g size=%g heads_first=%d "
           "packed=%d holes=%d lse=%d dependent=%d odd_out=%d pad=%d",
           s.name, s.head_dim, dtype_name(c.dtype), c.batch, c.heads_q, c.heads_kv, c.seqlen_q, c.page, c.most_keys, c.extra_pages, c.splits, c.blocks,
           (long)c.window, c.softcap, c.scale, c.size, c.heads_first, c.packed, c.holes, c.lse, c.dependent, c.odd_out, c.pad);
  return text;
}

// A case's tensors, in allocations of their own.
struct Ready {
  Case c;
  DecodeParams p;
  DecodeLaunch l;
  std::vector<void*> owned;
  uint16_t* out_begin = nullptr;
  int64_t out_count = 0, out_first = 0;
  std::vector<int32_t> lengths;

  template <typename T>
  T* take(int64_t count) {
    void* at = nullptr;
    CHECK(cudaMalloc(&at, std::max<int64_t>(1, count) * sizeof(T)));
    owned.push_back(at);
    return static_cast<T*>(at);
  }
  ~Ready() {
    for (void* at : owned) cudaFree(at);
  }
  Ready(const Ready&) = delete;

  explicit Ready(const Case& of) : c(of) {
    const bool half = c.dtype == DType::kHalf;
    const int d = kSm80DecodeShapes[c.config].head_dim;
    const int64_t pages_of = (c.most_keys + c.page - 1) / c.page, max_pages = pages_of + c.extra_pages, pages = pages_of * c.batch + 2;
    l.config = c.config, l.sm_count = c.blocks > 0 ? c.blocks : sms, l.dependent = c.dependent, l.chained = architecture >= 90;
    p.batch = c.batch, p.seqlen_q = c.seqlen_q, p.num_heads_q = c.heads_q, p.num_heads_kv = c.heads_kv, p.head_dim = d, p.page_size = c.page;
    p.max_pages = max_pages, p.table_stride = max_pages + (exact ? 0 : 3), p.num_pages = pages, p.window = c.window, p.softcap = c.softcap;
    p.softmax_scale = c.scale == 0.f ? 1.f / std::sqrt(static_cast<float>(d)) : c.scale, p.num_splits = c.splits;
    PageStrides s;
    if (c.heads_first) s.slot = d + c.pad, s.head = s.slot * c.page, s.page = s.head * c.heads_kv;
    else s.head = d + c.pad, s.slot = s.head * c.heads_kv, s.page = s.slot * c.page;
    const int64_t of_page = s.page, count = of_page * pages;
    if (c.packed) s.page *= 2;
    p.k_strides = p.v_strides = s;
    uint16_t* const k = take<uint16_t>(count * (c.packed ? 2 : 1));
    uint16_t* const v = c.packed ? k + of_page : take<uint16_t>(count);
    set<<<512, 256>>>(k, count * (c.packed ? 2 : 1), uint16_t{0xffff});
    if (!c.packed) set<<<512, 256>>>(v, count, uint16_t{0xffff});
    p.k = k, p.v = v;

    // The pages of all sequences in random order. Entries behind the last live key lead to NaN or to nowhere.
    std::vector<int32_t> order(pages_of * c.batch), table(p.table_stride * c.batch);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rnd(static_cast<uint32_t>(i))]);
    for (int b = 0; b < c.batch; ++b) {
      const int length = !c.lengths.empty() ? c.lengths[b]
                         : rnd(8) == 0      ? (rnd(2) ? (c.extra_pages == 0 ? 1 << 30 : 0) : -3)
                         : rnd(6) == 0      ? static_cast<int>(rnd(3))
                                            : static_cast<int>(rnd(c.most_keys + 1));
      lengths.push_back(length);
      const int64_t live = std::min<int64_t>(std::max(length, 0), max_pages * c.page);
      for (int64_t i = 0; i < p.table_stride; ++i) {
        int32_t& id = table[b * p.table_stride + i];
        id = i * c.page < live ? order[b * pages_of + i] : rnd(2) ? static_cast<int32_t>(pages - 1 - rnd(2)) : rnd(2) ? -1 : 0x7fffffff;
        if (c.holes && i * c.page < live && rnd(4) == 0) id = rnd(2) ? -1 - static_cast<int>(rnd(100)) : static_cast<int>(pages + rnd(1000));
      }
    }
    int32_t* const device_table = take<int32_t>(static_cast<int64_t>(table.size()));
    int32_t* const device_lengths = take<int32_t>(c.batch);
    CHECK(cudaMemcpy(device_table, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_lengths, lengths.data(), c.batch * 4, cudaMemcpyHostToDevice));
    p.page_table = device_table, p.seqused_k = device_lengths;
    for (int b = 0; b < c.batch; b += 32768) {
      const dim3 grid(std::min(256, c.most_keys * c.heads_kv), std::min(32768, c.batch));
      fill_keys<<<grid, 128>>>(k, p, p.k_strides, 11, c.size, half);
      fill_keys<<<grid, 128>>>(v, p, p.v_strides, 12, 1.f, half);
    }

    const int64_t rows = int64_t{c.batch} * c.seqlen_q * c.heads_q, margin = exact ? 0 : 4096;
    p.q_strides = {int64_t{c.seqlen_q} * c.heads_q * d, d, int64_t{c.heads_q} * d};
    uint16_t* const q = take<uint16_t>(rows * d);
    fill<<<512, 256>>>(q, rows * d, 13, 1.f, half);
    p.q = q;
    const int64_t wide = d + (c.odd_out ? 1 : 0);
    p.out_strides = {int64_t{c.seqlen_q} * c.heads_q * wide, wide, c.heads_q * wide};
    out_count = rows * wide + 2 * margin, out_first = margin;
    out_begin = take<uint16_t>(out_count);
    set<<<512, 256>>>(out_begin, out_count, uint16_t{0xabcd});
    p.out = out_begin + out_first;
    p.lse = c.lse ? take<float>(rows) : nullptr;
    p.workspace = new_workspace();
  }
  void* new_workspace() {
    const int64_t bytes = decode_workspace_bytes(p, l);
    unsigned char* const at = take<unsigned char>(bytes);
    if (bytes > 0) CHECK(cudaMemset(at, 0xff, bytes));
    return at;
  }
  void set_lengths(const std::vector<int32_t>& to) { CHECK(cudaMemcpy(const_cast<int32_t*>(p.seqused_k), to.data(), to.size() * 4, cudaMemcpyHostToDevice)); }
};

bool launch(const Ready& r, const DecodeParams& p) {
  try {
    launch_sm80_decode(r.c.dtype, p, r.l);
  } catch (const std::exception& e) {
    printf("LAUNCH FAILED %s: %s\n", text_of(r.c).c_str(), e.what());
    ++host_failures;
    return false;
  }
  return true;
}
Verdict* next_verdict(const std::string& name) {
  if (names.size() == kMaxCases) printf("more cases than there is room for\n"), exit(1);
  names.push_back(name);
  return verdicts + names.size() - 1;
}
void judge(const Ready& r, Verdict* v, int64_t step) {
  verify<<<kVerifyBlocks, 128>>>(r.p, r.c.dtype == DType::kHalf, step, weights, v);
  guards<<<512, 256>>>(r.out_begin, r.out_count, r.out_first, r.p, 0xabcd, v);
}

Case random_case(int config) {
  Case c;
  c.config = config;
  const int tile = kSm80DecodeShapes[config].tile_n;
  c.dtype = static_cast<DType>(rnd(2)), c.heads_kv = 1 + rnd(4), c.heads_q = c.heads_kv * (rnd(4) == 0 ? 1 + rnd(17) : 1 + rnd(8));
  c.seqlen_q = rnd(2) ? 1 : 1 + rnd(16), c.batch = rnd(8) == 0 ? 30 + rnd(300) : 1 + rnd(6);
  c.page = rnd(3) == 0 ? 1 + rnd(1024) : 16 << (2 * rnd(3));
  c.most_keys = c.batch > 20 ? 1 + rnd(300) : rnd(3) == 0 ? tile * (1 + rnd(4)) + rnd(3) : 1 + rnd(3000);
  c.extra_pages = rnd(2) * rnd(50), c.splits = rnd(2) ? 0 : 1 + rnd(9), c.blocks = rnd(3) == 0 ? 1 + rnd(20) : 0;
  c.window = rnd(3) == 0 ? 1 + rnd(rnd(2) ? 5 : 2000) : 0;
  if (rnd(30) == 0) c.window = int64_t{1} << 40;
  c.softcap = rnd(4) == 0 ? 5.f + rnd(30) : 0.f, c.size = rnd(3) == 0 ? 4.f : 1.f, c.scale = rnd(10) == 0 ? -0.1f : 0.f;
  c.heads_first = rnd(2), c.packed = rnd(2), c.holes = rnd(5) == 0, c.lse = rnd(2), c.dependent = architecture >= 90 && rnd(3) == 0, c.odd_out = rnd(4) == 0;
  c.pad = 8 * rnd(2);
  return c;
}

void random_cases(int each) {
  for (int config : configs()) {
    for (int i = 0; i < each; ++i) {
      Case c = random_case(config);
      if (exact) c.batch = std::min(c.batch, 4), c.most_keys = std::min(c.most_keys, 700);
      Ready r(c);
      Verdict* const v = next_verdict(text_of(c));
      const double work = 2e-9 * c.batch * c.heads_q * c.seqlen_q * (c.most_keys + c.page) * r.p.head_dim;
      if (launch(r, r.p)) judge(r, v, 1 + static_cast<int64_t>(work / 4));  // rows that are looked at
      CHECK(cudaDeviceSynchronize());
    }
  }
}

// The same bits again, behind another kernel, with a wider table, from a graph that was captured at length 1, and with fixed splits in any batch.
void same_bits() {
  for (int config : configs()) {
    for (int variant = 0; variant < 6; ++variant) {
      Case c;
      c.config = config, c.batch = 5, c.heads_q = 8, c.heads_kv = 2, c.seqlen_q = variant % 3 == 2 ? 4 : 1, c.most_keys = 9000, c.extra_pages = 100, c.lse = false;
      c.splits = variant < 3 ? 0 : 7, c.window = variant % 3 == 1 ? 3000 : 0, c.lengths = {9000, 1, 0, 4567, 130};
      Ready r(c);
      const int64_t per_row = int64_t{r.p.head_dim}, count = c.batch * c.seqlen_q * c.heads_q * per_row;
      uint16_t* const other = r.take<uint16_t>(count);
      Verdict* const v = next_verdict("same bits: " + text_of(c));
      cudaStream_t stream;
      CHECK(cudaStreamCreate(&stream));
      DecodeParams p = r.p;
      p.out = other, p.out_strides = {c.seqlen_q * c.heads_q * per_row, per_row, c.heads_q * per_row};
      if (!launch(r, r.p)) continue;
      judge(r, v, 1);
      const uint16_t* const first = r.out_begin + r.out_first;
      for (int round = 0; round < 6; ++round) {
        CHECK(cudaMemset(other, 0xee, count * 2));
        r.l.dependent = architecture >= 90 && round % 2 == 1;
        p.max_pages = round >= 2 ? r.p.max_pages : (9000 + c.page - 1) / c.page;  // a narrower table
        p.workspace = r.new_workspace();
        for (int n = 0; n < 3; ++n) launch(r, p);
        differs<<<256, 256>>>(first, other, count, v);
      }
      r.l.dependent = false;
      CHECK(cudaDeviceSynchronize());
      r.set_lengths(std::vector<int32_t>(c.batch, 1));
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      r.l.stream = stream;
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      launch(r, p);
      CHECK(cudaStreamEndCapture(stream, &graph));
      CHECK(cudaGraphInstantiate(&exec, graph, 0));
      CHECK(cudaGraphLaunch(exec, stream));
      CHECK(cudaStreamSynchronize(stream));
      r.set_lengths(r.lengths);
      CHECK(cudaMemset(other, 0xee, count * 2));
      CHECK(cudaDeviceSynchronize());
      CHECK(cudaGraphLaunch(exec, stream));
      differs<<<256, 256, 0, stream>>>(first, other, count, v);
      CHECK(cudaStreamSynchronize(stream));
      CHECK(cudaGraphExecDestroy(exec));
      CHECK(cudaGraphDestroy(graph));
      r.l.stream = nullptr;
      if (c.splits > 0) {  // alone
        for (int b = 0; b < c.batch; ++b) {
          DecodeParams alone = p;
          const int64_t at = b * p.out_strides.batch;
          alone.batch = 1, alone.q = static_cast<const uint16_t*>(p.q) + b * p.q_strides.batch, alone.page_table += b * p.table_stride, alone.seqused_k += b;
          launch(r, alone);
          differs<<<256, 256>>>(first + at, other, p.out_strides.batch, v);
        }
      }
      CHECK(cudaDeviceSynchronize());
      CHECK(cudaStreamDestroy(stream));
    }
  }
}

// Long sequences, many sequences, and pages 2^31 elements apart.
void large_cases() {
  for (int config : configs()) {
    Case c;
    c.config = config, c.heads_q = 4, c.heads_kv = 1, c.most_keys = 130000, c.lengths = {130000};
    {
      Ready r(c);
      if (launch(r, r.p)) judge(r, next_verdict("long " + text_of(c)), 1);
    }
    c.heads_q = 8, c.heads_kv = 2, c.batch = 1500, c.most_keys = 200, c.lengths.clear();
    {
      Ready r(c);
      if (launch(r, r.p)) judge(r, next_verdict("many " + text_of(c)), 7);
    }
    c.batch = 2, c.heads_q = c.heads_kv = 1, c.most_keys = 64, c.lengths = {64, 64};
    Ready r(c);
    const int64_t apart = (int64_t{1} << 31) + 64;  // the two pages that the sequences have
    uint16_t* const k = r.take<uint16_t>(apart + 64 * 256);
    r.p.k_strides.page = r.p.v_strides.page = apart, r.p.k = r.p.v = k;
    fill_keys<<<dim3(64, 2), 128>>>(k, r.p, r.p.k_strides, 5, 1.f, false);
    if (launch(r, r.p)) judge(r, next_verdict("far " + text_of(c)), 1);
    CHECK(cudaDeviceSynchronize());
  }
}

// FlashAttention-3, page 64, on an H200, taken in another run: for orientation.
struct Peer {
  int heads_q, heads_kv, head_dim;
  float us[10];
};
constexpr int kBatches[10] = {1, 1, 1, 8, 8, 32, 32, 64, 128, 256}, kLengths[10] = {1024, 8192, 65536, 1024, 4096, 1024, 4096, 8192, 2048, 1024};
constexpr Peer kPeers[] = {
    {16, 8, 128, {11.1f, 17.6f, 74.2f, 16.6f, 41.0f, 40.6f, 131, 485, 256, 266}}, {32, 8, 128, {11.9f, 18.7f, 73.5f, 17.3f, 41.7f, 41.9f, 131, 488, 256, 266}},
    {64, 8, 128, {12.0f, 19.1f, 75.1f, 17.0f, 41.7f, 42.3f, 132, 487, 258, 270}}, {8, 1, 128, {11.2f, 13.6f, 23.7f, 11.4f, 14.4f, 14.2f, 26, 72, 41, 45}},
    {16, 4, 256, {12.5f, 19.3f, 77.6f, 17.9f, 42.4f, 41.8f, 136, 501, 272, 302}}, {32, 8, 64, {11.6f, 17.1f, 44.4f, 13.9f, 26.3f, 27.7f, 75, 260, 148, 165}},
};

struct Bench {
  static constexpr int64_t kCache = (int64_t{1} << 29) + (int64_t{1} << 22), kCapacity = 131072;  // elements; keys of a row of the table
  uint16_t *k, *v, *q, *out;
  int32_t *table, *lengths;
  unsigned char* workspace;
  static constexpr int64_t kTable = int64_t{1} << 26, kQuery = int64_t{1} << 25, kWorkspace = int64_t{1} << 29;
  Bench() {
    for (auto p : {&k, &v}) CHECK(cudaMalloc(p, kCache * 2));
    for (auto p : {&q, &out}) CHECK(cudaMalloc(p, kQuery * 2));
    CHECK(cudaMalloc(&table, kTable * 4));
    CHECK(cudaMalloc(&lengths, 1 << 16));
    CHECK(cudaMalloc(&workspace, kWorkspace));
    for (auto p : {k, v}) fill<<<2048, 256>>>(p, kCache, p == k ? 1 : 2, 1.f, false);
    fill<<<2048, 256>>>(q, kQuery, 3, 1.f, false);
    CHECK(cudaDeviceSynchronize());
  }

  // Microseconds of a call, from a graph of calls over caches of at least 300 MB together.
  float time(int config, int heads_q, int heads_kv, int seqlen_q, int page, const std::vector<int>& of, int splits, bool dependent) {
    const int d = kSm80DecodeShapes[config].head_dim, batch = static_cast<int>(of.size());
    int64_t pages_of_call = 0;
    for (int n : of) pages_of_call += (n + page - 1) / page;
    const int64_t of_page = int64_t{page} * heads_kv * d, pages = kCache / of_page, bytes = pages_of_call * of_page * 4;
    const int64_t width = kCapacity / page;
    const int64_t copies = std::max<int64_t>(1, std::min({pages / pages_of_call, (300000000 + bytes - 1) / bytes, kTable / (width * batch), int64_t{80}}));
    std::vector<int32_t> order(pages), host(copies * batch * width, -1);
    for (int64_t i = 0; i < pages; ++i) order[i] = static_cast<int32_t>(i);
    for (int64_t i = pages; i > 1; --i) std::swap(order[i - 1], order[hash(static_cast<uint32_t>(i)) % i]);
    int64_t next = 0;
    for (int64_t n = 0; n < copies; ++n) {
      for (int b = 0; b < batch; ++b) {
        for (int i = 0; i * page < of[b]; ++i) host[(n * batch + b) * width + i] = order[next++];
      }
    }
    CHECK(cudaMemcpy(table, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(lengths, of.data(), batch * 4, cudaMemcpyHostToDevice));
    DecodeParams p;
    p.k = k, p.v = v, p.q = q, p.out = out;
    p.q_strides = p.out_strides = {int64_t{seqlen_q} * heads_q * d, d, int64_t{heads_q} * d};
    p.k_strides = p.v_strides = {of_page, int64_t{heads_kv} * d, d};
    p.table_stride = p.max_pages = width, p.num_pages = pages, p.page_size = page, p.seqused_k = lengths;
    p.batch = batch, p.seqlen_q = seqlen_q, p.num_heads_q = heads_q, p.num_heads_kv = heads_kv, p.head_dim = d;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(d)), p.num_splits = splits, p.workspace = workspace;
    DecodeLaunch l;
    l.sm_count = sms, l.config = config, l.dependent = dependent, l.chained = architecture >= 90;
    if (decode_workspace_bytes(p, l) > kWorkspace || int64_t{batch} * p.q_strides.batch > kQuery) return NAN;
    CHECK(cudaStreamCreate(&l.stream));
    const int calls = static_cast<int>(std::max<int64_t>(copies, bytes < 400000000 ? 24 : 6));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(l.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) {
      p.page_table = table + i % copies * batch * width;
      launch_sm80_decode(DType::kBFloat16, p, l);
    }
    CHECK(cudaStreamEndCapture(l.stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t e[2];
    for (auto& event : e) CHECK(cudaEventCreate(&event));
    std::vector<float> us;
    for (int round = 0; round < 12; ++round) {
      CHECK(cudaEventRecord(e[0], l.stream));
      CHECK(cudaGraphLaunch(exec, l.stream));
      CHECK(cudaEventRecord(e[1], l.stream));
      CHECK(cudaEventSynchronize(e[1]));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, e[0], e[1]));
      if (round >= 3) us.push_back(ms * 1000.f / calls);
    }
    std::sort(us.begin(), us.end());
    for (auto& event : e) CHECK(cudaEventDestroy(event));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(l.stream));
    return us[us.size() / 2];
  }
};

void timings(bool all) {
  Bench bench;
  const auto bytes_of = [](const std::vector<int>& of, int heads_kv, int d) {
    double keys = 0;
    for (int n : of) keys += n;
    return keys * heads_kv * d * 4;
  };
  printf("bfloat16, a table for %ld keys; us plain/dependent of each configuration; the best plain one in TB/s and its speed over FA3's page 64\n",
         (long)Bench::kCapacity);
  for (const Peer& peer : kPeers) {
    double product[3] = {1, 1, 1};
    int count[3] = {};
    for (int i = 0; i < 10; ++i) {
      const std::vector<int> of(kBatches[i], kLengths[i]);
      const double bytes = bytes_of(of, peer.heads_kv, peer.head_dim);
      printf("%d/%d D=%d B=%-3d L=%-5d %6.1f MB", peer.heads_q, peer.heads_kv, peer.head_dim, kBatches[i], kLengths[i], bytes * 1e-6);
      float best = 1e30f;
      for (int config : configs()) {
        if (kSm80DecodeShapes[config].head_dim != peer.head_dim) continue;
        if (kSm80DecodeShapes[config].warp_m > 16 && peer.heads_q / peer.heads_kv <= 16) continue;
        const float us = bench.time(config, peer.heads_q, peer.heads_kv, 1, 64, of, 0, false);
        printf("  %s %.2f", kSm80DecodeShapes[config].name, us);
        if (architecture >= 90) printf("/%.2f", bench.time(config, peer.heads_q, peer.heads_kv, 1, 64, of, 0, true));
        best = std::min(best, us);
        if (!all) continue;
        for (int page : {16, 256}) printf(" page %d: %.2f", page, bench.time(config, peer.heads_q, peer.heads_kv, 1, page, of, 0, false));
        for (int splits : {1, 4, 16}) printf(" splits %d: %.2f", splits, bench.time(config, peer.heads_q, peer.heads_kv, 1, 64, of, splits, false));
      }
      const int group = bytes <= 64e6 ? 0 : bytes <= 500e6 ? 1 : 2;
      product[group] *= peer.us[i] / best, ++count[group];
      printf("  %.2f TB/s  %.2fx\n", bytes / best * 1e-6, peer.us[i] / best);
      fflush(stdout);
    }
    printf("    geometric mean over FA3:");
    for (int g = 0; g < 3; ++g) {
      if (count[g] > 0) printf(" %s %.2f", g == 0 ? "to 64 MB" : g == 1 ? "to 500 MB" : "above", std::pow(product[g], 1.0 / count[g]));
    }
    printf("\n");
  }
  {
    bench.time(configs()[0], 32, 8, 1, 64, {1024}, 0, false);  // fills table and lengths
    DecodeParams p;
    DecodeLaunch l;
    l.sm_count = sms, l.config = configs()[0], l.chained = architecture >= 90;
    const int d = kSm80DecodeShapes[l.config].head_dim;
    p.k = bench.k, p.v = bench.v, p.q = bench.q, p.out = bench.out, p.page_table = bench.table, p.seqused_k = bench.lengths, p.workspace = bench.workspace;
    p.q_strides = p.out_strides = {32 * d, d, 32 * d}, p.k_strides = p.v_strides = {64 * 8 * d, 8 * d, d};
    p.table_stride = p.max_pages = Bench::kCapacity / 64, p.num_pages = Bench::kCache / (64 * 8 * d), p.page_size = 64;
    p.batch = 1, p.num_heads_q = 32, p.num_heads_kv = 8, p.head_dim = d, p.softmax_scale = 0.1f;
    CHECK(cudaDeviceSynchronize());
    timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < 400; ++i) launch_sm80_decode(DType::kBFloat16, p, l);
    clock_gettime(CLOCK_MONOTONIC, &to);
    CHECK(cudaDeviceSynchronize());
    printf("host: %.2f us a call of the launcher, two kernels\n", ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) * 1e-3 / 400);
  }
  const auto row = [&](const char* what, int heads_q, int heads_kv, int d, int seqlen_q, const std::vector<int>& of) {
    printf("%s %d/%d D=%d B=%zu seqlen_q=%d:", what, heads_q, heads_kv, d, of.size(), seqlen_q);
    for (int config : configs()) {
      if (kSm80DecodeShapes[config].head_dim != d) continue;
      const float us = bench.time(config, heads_q, heads_kv, seqlen_q, 64, of, 0, false);
      printf("  %s %.2f us %.2f TB/s", kSm80DecodeShapes[config].name, us, bytes_of(of, heads_kv, d) / us * 1e-6);
    }
    printf("\n");
    fflush(stdout);
  };
  for (int d : {64, 128, 256}) {
    const int heads_q = d == 256 ? 16 : 32, heads_kv = d == 256 ? 4 : 8;
    for (int batch : {8, 32}) {
      random_state = 7;
      std::vector<int> ragged(batch);
      for (int& n : ragged) n = std::max(1, static_cast<int>(std::exp2(rnd(15000) * 0.001)));
      row("ragged, 1 to 32k", heads_q, heads_kv, d, 1, ragged);
    }
    for (int seqlen_q : {2, 4, 8, 16}) {
      row("short queries", heads_q, heads_kv, d, seqlen_q, std::vector<int>(8, 4096));
      row("short queries", heads_q, heads_kv, d, seqlen_q, std::vector<int>(32, 1024));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  int major = 0, minor = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  architecture = 10 * major + minor;
  if (mode.rfind("time", 0) != 0) {
    CHECK(cudaMalloc(&verdicts, sizeof(Verdict) * kMaxCases));
    CHECK(cudaMemset(verdicts, 0, sizeof(Verdict) * kMaxCases));
    CHECK(cudaMalloc(&weights, sizeof(double) * kVerifyBlocks * kMostKeys));
    exact = mode == "sanitize";
    random_cases(exact ? 6 : 80);
    if (!exact) same_bits(), large_cases();
    CHECK(cudaDeviceSynchronize());
    std::vector<Verdict> v(names.size());
    CHECK(cudaMemcpy(v.data(), verdicts, sizeof(Verdict) * v.size(), cudaMemcpyDeviceToHost));
    int failed = host_failures;
    float most = 0;
    for (size_t i = 0; i < v.size(); ++i) {
      most = std::max(most, v[i].most);
      if (v[i].bad == 0 && v[i].guard == 0) continue;
      if (++failed <= 40) {
        printf("FAILED %s: %u wrong, first of them [%d, %d, %d, %d] = %g, not %g; %u guards overwritten\n", names[i].c_str(), v[i].bad, v[i].batch, v[i].head,
               v[i].row, v[i].column, v[i].got, v[i].want, v[i].guard);
      }
    }
    printf("%zu cases, %d failed, largest error %.3f of the limit\n", names.size(), failed, most);
    fflush(stdout);
    CHECK(cudaFree(weights));
    if (failed) return 1;
  }
  if (mode == "" || mode.rfind("time", 0) == 0) timings(argc > 2 && std::string(argv[2]) == "all");
  return 0;
}
