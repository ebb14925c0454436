// Runs the launchers of this package, without torch and Python, over the edges of their tiles against FP64, then times every configuration.
//
//   kernel_check [check|time|time bf16|time all|sanitize]     nothing: check, then time; `sanitize` is a small set in exact allocations, for compute-sanitizer
//   kernel_check one KERNEL CONFIGURATION SLICES M N K     that alone, a few times, for a profiler
//
// From the root of the repository:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -cudart static -I packages/dandan-core/src/dandan_ops_core/include
//        -I packages/dandan-w4a16/csrc packages/dandan-w4a16/benchmarks/kernel_check.cu packages/dandan-w4a16/csrc/sm*.cu -o kernel_check
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "configs.h"
#include "pack.h"
#include "w4a16.h"

using namespace dandan_w4a16;

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
__global__ void fill_words(uint32_t* p, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    p[i] = hash(static_cast<uint32_t>(i) + seed);
  }
}
// Uniform in [-size, size); with identity, 1 where column == row + first and 0 elsewhere.
__global__ void fill(uint16_t* p, int64_t rows, int64_t cols, int64_t stride, uint32_t seed, float size, bool half, int64_t identity = -1) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * cols; i += gridDim.x * int64_t{blockDim.x}) {
    const float v = (static_cast<int>(hash(static_cast<uint32_t>(i) * 2654435761u + seed) >> 8) - (1 << 23)) * (size / (1 << 23));
    p[i / cols * stride + i % cols] = to_bits(identity < 0 ? v : i % cols == i / cols + identity ? 1.f : 0.f, half);
  }
}
// Scales size * [0.5, 1.5), some negative, and zero points.
__global__ void fill_scales(uint16_t* scales, uint8_t* zeros, int64_t count, uint32_t seed, float size, bool half) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    const uint32_t h = hash(static_cast<uint32_t>(i) * 2654435761u + seed);
    scales[i] = to_bits(size * (0.5f + (h >> 8) * 0x1p-24f) * (h & 0x70 ? 1.f : -1.f), half);
    zeros[i] = h & 15;
  }
}
// Scale words of one value, for timing.
__global__ void fill_scale_words(uint32_t* p, int64_t count, float scale, bool half) {
  const uint32_t word = to_bits(scale, half) | static_cast<uint32_t>(to_bits(8.f, half)) << 16;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) p[i] = word;
}

struct Verdict {
  unsigned bad, guard;
  int row, col;
  float got, want;
};

// Against the canonical weight; `exact`: x is rows of the identity and out the weight itself.
__global__ void verify(Params p, Weight w, bool half, bool exact, Verdict* v) {
  const int64_t groups = (w.k + w.group - 1) / w.group;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.m * p.n; i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t r = i / p.n, c = i % p.n;
    const uint16_t* const x = static_cast<const uint16_t*>(p.x) + r * p.x_stride;
    double s = 0, magnitude = 0;
    for (int64_t k = 0; k < p.k; ++k) {
      const int64_t g = c * groups + k / w.group;
      const int q = static_cast<uint32_t>(w.qweight[c * (w.k / 8) + k / 8]) >> (4 * (k % 8)) & 15;
      const float scale = from_bits(static_cast<const uint16_t*>(w.scales)[g], half);
      const float weight = from_bits(to_bits(static_cast<float>(q - w.zeros[g]) * scale, half), half);
      const double t = static_cast<double>(from_bits(x[k], half)) * weight;
      s += t, magnitude += fabs(t);
    }
    if (p.bias != nullptr) s += from_bits(static_cast<const uint16_t*>(p.bias)[c], half);
    const float got = from_bits(static_cast<const uint16_t*>(p.out)[r * p.out_stride + c], half);
    const double limit = exact ? 0 : fabs(s) * (half ? 0x1p-11 : 0x1p-8) * 1.001 + magnitude * 0x1p-19 + 1e-7;  // a rounding step, and fp32 sums
    if (!(fabs(got - s) <= limit) && atomicAdd(&v->bad, 1) == 0) {
      v->row = static_cast<int>(r), v->col = static_cast<int>(c), v->got = got, v->want = static_cast<float>(s);
    }
  }
}
// Everything of out around the matrix still holds the poison.
__global__ void guards(const uint16_t* begin, int64_t count, int64_t first, int64_t rows, int64_t cols, int64_t stride, uint16_t value, Verdict* v) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t j = i - first;
    const bool inside = j >= 0 && j < (rows - 1) * stride + cols && j % stride < cols;
    if (!inside && begin[i] != value) atomicAdd(&v->guard, 1);
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
constexpr int kMaxCases = 60000;
uint16_t *arena_x = nullptr, *arena_out = nullptr, *arena_out2 = nullptr, *arena_bias = nullptr, *arena_scales = nullptr;
int32_t* arena_qweight = nullptr;
uint8_t* arena_zeros = nullptr;
uint32_t *arena_codes = nullptr, *arena_words = nullptr;
constexpr int64_t kCodeWords = int64_t{1} << 27, kScaleWords = int64_t{1} << 25;
Verdict* verdicts = nullptr;
std::vector<std::string> names;
std::vector<int> host_failures;
int used = 0;

uint32_t random_state = 1;
uint32_t rnd(uint32_t n) { return random_state = random_state * 1664525u + 1013904223u, (random_state >> 10) % n; }

// The kernels of the package: what this file has to know of each.
struct Kernel {
  const char *name, *letter;
  int count;
  const char* (*config)(int);
  int64_t (*most_rows)(int config);
  bool (*takes)(int config, int split);
  bool (*available)();
  void (*launch)(DType, const Params&, const Launch&);
  int64_t (*tokens)(int config) = nullptr;  // and columns of a tile, of those that take any number of rows
  int64_t (*columns)(int config) = nullptr;
};
void* workspace = nullptr;
constexpr int64_t kWorkspace = int64_t{1} << 28;
void launch_mma(DType t, const Params& p, const Launch& l) {
  Launch with = l;
  with.workspace = workspace;
  launch_sm80_mma(t, p, with);
}
constexpr int64_t kAnyRows = int64_t{1} << 40;
const Kernel kKernels[] = {
    {"sm80_decode", "d", kDecodeShapeCount, [](int c) { return kDecodeShapes[c].name; }, [](int) { return int64_t{kMaxDecodeRows}; },
     [](int, int split) { return split == 1 || (architecture >= 90 && split <= kMaxDecodeSplit); }, [] { return true; }, launch_sm80_decode},
    {"sm90_decode", "r", kRingShapeCount, [](int c) { return kRingShapes[c].name; }, [](int c) { return int64_t{kRingShapes[c].tokens}; },
     [](int, int split) { return split <= kMaxRingSplit; }, [] { return architecture >= 90; }, launch_sm90_decode},
    {"sm90a_wgmma", "w", kWgmmaShapeCount, [](int c) { return kWgmmaShapes[c].name; }, [](int) { return kAnyRows; },
     [](int c, int split) { return (kWgmmaShapes[c].splits >> split & 1) != 0; }, [] { return architecture == 90; }, launch_sm90a_wgmma,
     [](int c) { return int64_t{kWgmmaShapes[c].tokens}; }, [](int c) { return int64_t{64 * kWgmmaShapes[c].consumers}; }},
    {"sm80_mma", "m", kMmaShapeCount, [](int c) { return kMmaShapes[c].name; }, [](int) { return kAnyRows; },
     [](int, int split) { return split <= 4 || split == 8; }, [] { return true; }, launch_mma, [](int c) { return int64_t{kMmaShapes[c].tokens}; },
     [](int c) { return int64_t{kMmaShapes[c].columns}; }},
};
constexpr int kKernelCount = sizeof kKernels / sizeof kKernels[0];
constexpr int64_t kFewRows = 64;  // a kernel that takes no more is checked in other shapes
bool few(int kernel, int config) { return kKernels[kernel].most_rows(config) <= kFewRows; }
int count_of(int kernel) { return kKernels[kernel].count; }
const char* name_of(int kernel, int config) { return kKernels[kernel].config(config); }
bool takes(int kernel, int config, int split) { return kKernels[kernel].takes(config, split); }
void launch_kernel(int kernel, DType t, const Params& p, const Launch& l) { kKernels[kernel].launch(t, p, l); }

struct Form {
  int kernel, config, split;
};
std::vector<Form> all_forms() {
  std::vector<Form> forms;
  for (int kernel = 0; kernel < kKernelCount; ++kernel) {
    if (!kKernels[kernel].available()) continue;
    for (int config = 0; config < count_of(kernel); ++config) {
      for (int split = 1; split <= 8; ++split) {
        if (takes(kernel, config, split)) forms.push_back({kernel, config, split});
      }
    }
  }
  return forms;
}

struct Case {
  int kernel, config, split;
  DType dtype;
  int64_t m, n, k;
  int group;
  int64_t x_stride, out_stride;
  int offset;  // of out, elements
  bool bias, dependent;
  int64_t identity;
};

// The canonical weight of a case in the arenas, and the kernel-ordered one made from it by the device.
Weight make_weight(DType dtype, int64_t n, int64_t k, int group, uint32_t seed, float size) {
  Weight w;
  w.qweight = arena_qweight, w.scales = arena_scales, w.zeros = arena_zeros, w.codes = arena_codes + 16, w.scale_words = arena_words + 16;
  w.n = n, w.k = k, w.group = group;
  fill_words<<<256, 256>>>(reinterpret_cast<uint32_t*>(w.qweight), n * k / 8, seed);
  fill_scales<<<64, 256>>>(arena_scales, w.zeros, n * ((k + group - 1) / group), seed + 1, size, dtype == DType::kHalf);
  poison<<<256, 256>>>(arena_codes, code_words(n, k) + 32, 0xffffffffu);
  poison<<<64, 256>>>(arena_words, scale_words(n, k, group) + 32, 0xffffffffu);  // NaN where something is not written
  launch_sm80_repack(dtype, w, nullptr);
  return w;
}

std::string text_of(const Case& c) {
  char text[320];
  snprintf(text, sizeof text, "%s %s split=%d %s m=%ld n=%ld k=%ld group=%d strides %ld %ld offset %d bias=%d dependent=%d identity=%ld",
           kKernels[c.kernel].name, name_of(c.kernel, c.config), c.split, dtype_name(c.dtype), (long)c.m, (long)c.n, (long)c.k, c.group, (long)c.x_stride,
           (long)c.out_stride, c.offset, c.bias, c.dependent, (long)c.identity);
  return text;
}

std::string form_text(int kernel, int config, int split) {
  return std::string(kKernels[kernel].name) + " " + name_of(kernel, config) + " split=" + std::to_string(split);
}

void run_case(const Case& c) {
  if (used == kMaxCases) printf("more cases than there is room for\n"), exit(1);
  const bool half = c.dtype == DType::kHalf, far = c.x_stride > 100000;
  uint16_t *const x = arena_x + kGuard, *const out = arena_out + kGuard + c.offset;
  const int64_t size = (c.m - 1) * c.out_stride + c.n + 2 * kGuard;
  const Weight w = make_weight(c.dtype, c.n, c.k, c.group, used * 7 + 1, 0.02f);
  if (!far) {
    poison<<<256, 256>>>(arena_x, (c.m - 1) * c.x_stride + c.k + 2 * kGuard, uint16_t{0xffff});
    poison<<<256, 256>>>(arena_out, size, uint16_t{0xabcd});
  }
  if (c.dependent) CHECK(cudaDeviceSynchronize());  // the call may read the weight before what is enqueued from here on has ended
  fill<<<256, 256>>>(x, c.m, c.k, c.x_stride, used * 7 + 3, 1.f, half, c.identity);
  fill<<<16, 256>>>(arena_bias, 1, c.n, c.n, used * 7 + 4, 4.f, half);
  Params p;
  p.x = x, p.codes = w.codes, p.scales = w.scale_words, p.bias = c.bias ? arena_bias : nullptr, p.out = out;
  p.x_stride = c.m == 1 && c.k % 16 == 0 ? 5 : c.x_stride, p.out_stride = c.out_stride, p.m = c.m, p.n = c.n, p.k = c.k, p.group = c.group;
  Launch l;
  l.sm_count = sms, l.dependent = c.dependent, l.tile = {c.config, c.split};
  names.push_back(text_of(c));
  try {
    launch_kernel(c.kernel, c.dtype, p, l);
  } catch (const std::exception& e) {
    printf("LAUNCH FAILED %s: %s\n", names.back().c_str(), e.what());
    host_failures.push_back(used++);
    return;
  }
  verify<<<static_cast<unsigned>(std::min<int64_t>((c.m * c.n + 127) / 128, 8192)), 128>>>(p, w, half, c.identity >= 0 && !c.bias, verdicts + used);
  if (!far) guards<<<256, 256>>>(arena_out, size, out - arena_out, c.m, c.n, c.out_stride, 0xabcd, verdicts + used);
  ++used;
}

int64_t up8(int64_t v) { return (v + 7) / 8 * 8; }

constexpr int64_t kN[] = {1, 7, 8, 16, 63, 64, 65, 129}, kK[] = {8, 32, 56, 64, 72, 128, 200, 1024}, kM[] = {1, 8, 17, 31, 64, 65, 130};
constexpr int kGroups[] = {32, 64, 128};

// The device's repack against the host's, and back, bit for bit.
void packing() {
  std::vector<int32_t> qweight;
  std::vector<uint16_t> scales;
  std::vector<uint8_t> zeros;
  std::vector<uint32_t> codes, words, got_codes, got_words;
  for (int dtype = 0; dtype < 2; ++dtype) for (int64_t n : kN) for (int64_t k : kK) for (int group : kGroups) {
    Weight w = make_weight(static_cast<DType>(dtype), n, k, group, static_cast<uint32_t>(n * k), 0.02f), h = w;
    const int64_t groups = (k + group - 1) / group;
    qweight.resize(n * k / 8), scales.resize(n * groups), zeros.resize(n * groups);
    codes.resize(code_words(n, k)), words.resize(scale_words(n, k, group)), got_codes.resize(codes.size() + 32), got_words.resize(words.size() + 32);
    const auto fetch = [&] {
      CHECK(cudaMemcpy(qweight.data(), w.qweight, qweight.size() * 4, cudaMemcpyDeviceToHost));
      CHECK(cudaMemcpy(scales.data(), w.scales, scales.size() * 2, cudaMemcpyDeviceToHost));
      CHECK(cudaMemcpy(zeros.data(), w.zeros, zeros.size(), cudaMemcpyDeviceToHost));
    };
    fetch();
    CHECK(cudaMemcpy(got_codes.data(), arena_codes, got_codes.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got_words.data(), arena_words, got_words.size() * 4, cudaMemcpyDeviceToHost));
    h.qweight = qweight.data(), h.scales = scales.data(), h.zeros = zeros.data(), h.codes = codes.data(), h.scale_words = words.data();
    pack_on_host(static_cast<DType>(dtype), h);
    bool good = std::equal(codes.begin(), codes.end(), got_codes.begin() + 16) && std::equal(words.begin(), words.end(), got_words.begin() + 16);
    for (int i = 0; i < 16; ++i) {
      good &= got_codes[i] == ~0u && got_words[i] == ~0u && got_codes[codes.size() + 16 + i] == ~0u && got_words[words.size() + 16 + i] == ~0u;
    }
    const auto before_qweight = qweight;
    const auto before_scales = scales;
    const auto before_zeros = zeros;
    poison<<<64, 256>>>(reinterpret_cast<uint32_t*>(w.qweight), n * k / 8, 0x77777777u);
    poison<<<64, 256>>>(arena_scales, n * groups, uint16_t{0x7777});
    poison<<<64, 256>>>(w.zeros, n * groups, uint8_t{99});
    launch_sm80_unpack(static_cast<DType>(dtype), w, nullptr);
    fetch();
    good &= qweight == before_qweight && scales == before_scales && zeros == before_zeros;
    names.push_back("repack n=" + std::to_string(n) + " k=" + std::to_string(k) + " group=" + std::to_string(group));
    if (!good) host_failures.push_back(used);
    ++used;
  }
}

// Rows of the weight itself, against the canonical one, bit for bit but for the sign of zero; `out` is [count, k].
__global__ void verify_rows(const uint16_t* out, int64_t first, int64_t count, Weight w, bool half, Verdict* v) {
  const int64_t groups = (w.k + w.group - 1) / w.group;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count * w.k; i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t r = first + i / w.k, k = i % w.k;
    const int q = static_cast<uint32_t>(w.qweight[r * (w.k / 8) + k / 8]) >> (4 * (k % 8)) & 15;
    const float scale = from_bits(static_cast<const uint16_t*>(w.scales)[r * groups + k / w.group], half);
    const uint16_t want = to_bits(static_cast<float>(q - w.zeros[r * groups + k / w.group]) * scale, half);
    if (out[i] != want && ((out[i] | want) & 0x7fff) != 0 && atomicAdd(&v->bad, 1) == 0) {
      v->row = static_cast<int>(r), v->col = static_cast<int>(k), v->got = from_bits(out[i], half), v->want = from_bits(want, half);
    }
  }
}

void rows_case(DType dtype, const Weight& w, int64_t first, int64_t count, bool dependent, uint16_t* begin, int64_t guard) {
  Params p;
  p.codes = w.codes, p.scales = w.scale_words, p.n = w.n, p.k = w.k, p.group = w.group;
  Launch l;
  l.sm_count = sms, l.dependent = dependent;
  if (dependent) CHECK(cudaDeviceSynchronize());
  poison<<<256, 256>>>(begin, count * w.k + 2 * guard, uint16_t{0xabcd});
  launch_sm80_dequantize(dtype, p, first, count, begin + guard, l);
  verify_rows<<<1024, 128>>>(begin + guard, first, count, w, dtype == DType::kHalf, verdicts + used);
  guards<<<256, 256>>>(begin, count * w.k + 2 * guard, guard, 1, count * w.k, count * w.k, 0xabcd, verdicts + used);
  names.push_back("sm80_dequantize n=" + std::to_string(w.n) + " k=" + std::to_string(w.k) + " group=" + std::to_string(w.group) + " rows " +
                  std::to_string(first) + " and " + std::to_string(count - 1) + " more, " + dtype_name(dtype));
  ++used;
}

void rows() {
  for (int dtype = 0; dtype < 2; ++dtype) for (int64_t n : kN) for (int64_t k : kK) for (int group : kGroups) {
    const Weight w = make_weight(static_cast<DType>(dtype), n, k, group, used * 7 + 1, 0.02f);
    const int64_t first = rnd(static_cast<uint32_t>(n));
    rows_case(static_cast<DType>(dtype), w, 0, n, rnd(4) == 0, arena_out, kGuard);
    rows_case(static_cast<DType>(dtype), w, first, 1 + rnd(static_cast<uint32_t>(n - first)), rnd(4) == 0, arena_out, kGuard);
  }
  const Weight w = make_weight(DType::kHalf, 5000, 4104, 128, used, 0.02f);
  for (int64_t first = 0; first < w.n; first += 2048) rows_case(DType::kHalf, w, first, std::min<int64_t>(2048, w.n - first), false, arena_out, kGuard);
  CHECK(cudaDeviceSynchronize());
}

void edges() {
  for (const auto& [kernel, config, split] : all_forms()) {
    const auto one = [&, kernel = kernel, config = config, split = split](int64_t m, int64_t n, int64_t k, int group, int64_t identity) {
      Case c{};
      c.kernel = kernel, c.config = config, c.split = split, c.dtype = static_cast<DType>(rnd(2)), c.m = m, c.n = n, c.k = k, c.group = group;
      c.x_stride = k + 8 * (rnd(2) ? rnd(5) : 0), c.out_stride = rnd(2) ? up8(n) : n + rnd(9), c.offset = rnd(2) ? 0 : rnd(8);
      c.bias = identity < 0 && rnd(2), c.dependent = rnd(4) == 0, c.identity = identity;
      run_case(c);
    };
    const uint32_t rows = static_cast<uint32_t>(std::min(kKernels[kernel].most_rows(config), kFewRows)), rows16 = std::min(rows, 16u);
    for (int64_t n : kN) for (int64_t k : kK) {
      if (few(kernel, config)) {
        for (int group : kGroups) one(1 + rnd(rows), n, k, group, -1);
      } else {
        for (int64_t m : kM) one(m, n, k, kGroups[rnd(3)], -1);
      }
    }
    if (few(kernel, config)) {
      for (int m = 1; m <= static_cast<int>(rows); ++m) one(m, 100, 456, kGroups[m % 3], -1);
      for (int group : kGroups) for (int64_t k = 0; k < 528; k += rows16) one(rows16, 129, 528, group, k);
      for (int64_t k : {2048, 4096, 8192, 16384}) one(1 + rnd(rows), 300, k, kGroups[rnd(3)], -1);  // many rounds of the rings
    } else {
      for (int group : kGroups) one(528, 129, 528, group, 0);
      for (int64_t k : {2048, 8192}) one(kKernels[kernel].tokens(config) + rnd(40), 300, k, kGroups[rnd(3)], -1);
      one(300, 520, 2048, 64, -1);
    }
  }
  CHECK(cudaDeviceSynchronize());
}

// Rows 2^28 elements apart, and a weight of more than 2^32 codes: offsets beyond 32 bits.
void far_offsets() {
  const int64_t far = int64_t{1} << 28, n = 530000, k = 8192, groups = k / 128;
  uint16_t *const keep_x = arena_x, *const keep_out = arena_out, *const keep_scales = arena_scales;
  int32_t* const keep_qweight = arena_qweight;
  uint8_t* const keep_zeros = arena_zeros;
  uint32_t *const keep_codes = arena_codes, *const keep_words = arena_words;
  void* all[7] = {};
  const int64_t rows = (16 * far + 100000) * 2, code_bytes = code_words(n, k) * 4 + 128, word_bytes = scale_words(n, k, 128) * 4 + 128;
  const int64_t sizes[7] = {rows, rows, n * k / 2, n * groups * 2, n * groups, code_bytes, word_bytes};
  for (int i = 0; i < 7; ++i) {
    if (cudaMalloc(&all[i], sizes[i]) == cudaSuccess) continue;
    cudaGetLastError();
    printf("no memory for rows 2^28 elements apart and 2^32 codes: not checked\n");
    for (void* q : all) cudaFree(q);
    return;
  }
  arena_x = static_cast<uint16_t*>(all[0]), arena_out = static_cast<uint16_t*>(all[1]);
  for (int kernel = 0; kernel < kKernelCount; ++kernel) {
    for (int split = 1; split <= 2; ++split) {
      if (!kKernels[kernel].available() || !takes(kernel, 1, split)) continue;
      run_case({kernel, 1, split, DType::kHalf, std::min<int64_t>(kKernels[kernel].most_rows(1), 16), 280, 272, 64, far + 8 * (split - 1), far + split - 1, 0, true, false, -1});
    }
  }
  arena_x = keep_x, arena_out = keep_out;
  arena_qweight = static_cast<int32_t*>(all[2]), arena_scales = static_cast<uint16_t*>(all[3]), arena_zeros = static_cast<uint8_t*>(all[4]);
  arena_codes = static_cast<uint32_t*>(all[5]), arena_words = static_cast<uint32_t*>(all[6]);
  for (int kernel = 0; kernel < kKernelCount; ++kernel) {
    if (kKernels[kernel].available()) run_case({kernel, 2, 1, DType::kHalf, 2, n, k, 128, k, n, 0, false, false, -1});
  }
  CHECK(cudaDeviceSynchronize());
  arena_qweight = keep_qweight, arena_scales = keep_scales, arena_zeros = keep_zeros, arena_codes = keep_codes, arena_words = keep_words;
  for (void* q : all) CHECK(cudaFree(q));
}

// x <- x . w, eight times in a row with programmatic dependent launch, against the same without: every bit. Kernels alternate where both can.
void chains() {
  constexpr int kSize = 1024, kLinks = 8, kGroup = 64;
  Weight w[kLinks];
  for (int i = 0; i < kLinks; ++i) {
    w[i] = make_weight(DType::kBFloat16, kSize, kSize, kGroup, 100 + i, 0.005f);
    uint32_t* const codes = arena_codes + (i + 1) * (code_words(kSize, kSize) + 64);
    uint32_t* const words = arena_words + (i + 1) * (scale_words(kSize, kSize, kGroup) + 64);
    CHECK(cudaMemcpy(codes, w[i].codes, code_words(kSize, kSize) * 4, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy(words, w[i].scale_words, scale_words(kSize, kSize, kGroup) * 4, cudaMemcpyDeviceToDevice));
    w[i].codes = codes, w[i].scale_words = words;
  }
  for (const auto& [kernel, config, split] : all_forms()) {
    for (int m : {1, 13, 130}) {
      if (m > kKernels[kernel].most_rows(config)) continue;
      const int64_t size = int64_t{m} * kSize;
      for (int round = 0; round < 5; ++round) {
        const bool plain = round == 0;
        uint16_t* const x = plain ? arena_out2 : arena_out;
        CHECK(cudaMemset(x, 0, size * 2 * (kLinks + 1)));
        fill<<<256, 256>>>(x, m, kSize, kSize, 5, 1.f, false);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < kLinks; ++i) {
          Params p;
          p.x = x + i * size, p.out = x + (i + 1) * size, p.codes = w[i].codes, p.scales = w[i].scale_words;
          p.m = m, p.n = p.k = p.x_stride = p.out_stride = kSize, p.group = kGroup;
          Launch l;
          l.sm_count = sms, l.dependent = !plain;
          const int next = (kernel + 1 + i / 3) % kKernelCount, next_config = (config + i) % count_of(next);
          const bool other = i % 3 == 2 && kKernels[next].available() && m <= kKernels[next].most_rows(next_config) && takes(next, next_config, 1);
          l.tile = other ? Tile{next_config, 1} : Tile{config, split};
          launch_kernel(other ? next : kernel, DType::kBFloat16, p, l);
        }
        if (!plain) differs<<<256, 256>>>(arena_out, arena_out2, (kLinks + 1) * size, verdicts + used);
      }
      names.push_back("chain of " + form_text(kernel, config, split) + " m=" + std::to_string(m));
      ++used;
    }
  }
  CHECK(cudaDeviceSynchronize());
}

// The same product again and again, against its first result, which is verified: every bit.
void again() {
  const int64_t n = 3100, k = 4096, stride = 3101;
  for (const auto& [kernel, config, split] : all_forms()) {
    Params p;
    p.m = std::min<int64_t>(kKernels[kernel].most_rows(config), 200), p.n = n, p.k = k, p.x_stride = k, p.out_stride = stride, p.group = 64;
    const int64_t size = (p.m - 1) * stride + n;
    const Weight w = make_weight(DType::kBFloat16, n, k, 64, used, 0.02f);
    fill<<<256, 256>>>(arena_x, p.m, k, k, used * 3 + 1, 1.f, false);
    CHECK(cudaMemset(arena_out, 0, size * 2));
    CHECK(cudaMemset(arena_out2, 0, size * 2));
    Launch l;
    l.sm_count = sms, l.tile = {config, split};
    p.x = arena_x, p.codes = w.codes, p.scales = w.scale_words, p.out = arena_out;
    launch_kernel(kernel, DType::kBFloat16, p, l);
    verify<<<8192, 128>>>(p, w, false, false, verdicts + used);
    p.out = arena_out2;
    for (int r = 0; r < 100; ++r) {
      launch_kernel(kernel, DType::kBFloat16, p, l);
      differs<<<512, 256>>>(arena_out, arena_out2, size, verdicts + used);
    }
    names.push_back("again and again " + form_text(kernel, config, split));
    ++used;
  }
  CHECK(cudaDeviceSynchronize());
}

// Every configuration and split once, in allocations of their exact size.
void sanitize() {
  for (const auto& [kernel, config, split] : all_forms()) {
    const int round = used / 2;  // two cases each
    const DType dtype = static_cast<DType>(round % 2);
    const int group = 32 << round % 3;
    const int64_t most = kKernels[kernel].most_rows(config), m = few(kernel, config) ? 1 + round % most : 140, n = 129, k = 64 * (few(kernel, config) ? 75 : 15) + 8;
    const int64_t groups = (k + group - 1) / group, code_bytes = code_words(n, k) * 4, word_bytes = scale_words(n, k, group) * 4;
    void* all[10];
    const int64_t first = round % 97, count = 1 + round % 32;
    const int64_t sizes[10] = {m * k * 2, n * 2, ((m - 1) * (n + 2) + n) * 2, n * k / 2, n * groups * 2, n * groups, code_bytes, word_bytes,
                               std::max<int64_t>(mma_workspace_bytes(m, n, split), 4), count * k * 2};
    for (int i = 0; i < 10; ++i) CHECK(cudaMalloc(&all[i], sizes[i]));
    workspace = all[8];
    Weight w;
    w.qweight = static_cast<int32_t*>(all[3]), w.scales = all[4], w.zeros = static_cast<uint8_t*>(all[5]), w.codes = static_cast<uint32_t*>(all[6]);
    w.scale_words = static_cast<uint32_t*>(all[7]), w.n = n, w.k = k, w.group = group;
    fill_words<<<8, 256>>>(reinterpret_cast<uint32_t*>(w.qweight), n * k / 8, used);
    fill_scales<<<8, 256>>>(static_cast<uint16_t*>(w.scales), w.zeros, n * groups, used + 1, 0.02f, dtype == DType::kHalf);
    launch_sm80_repack(dtype, w, nullptr);
    fill<<<8, 256>>>(static_cast<uint16_t*>(all[0]), m, k, k, used * 3 + 1, 1.f, dtype == DType::kHalf);
    fill<<<1, 256>>>(static_cast<uint16_t*>(all[1]), 1, n, n, used * 3 + 3, 4.f, dtype == DType::kHalf);
    Params p;
    p.x = all[0], p.bias = all[1], p.out = all[2], p.codes = w.codes, p.scales = w.scale_words;
    p.x_stride = k, p.out_stride = n + 2, p.m = m, p.n = n, p.k = k, p.group = group;
    Launch l;
    l.sm_count = sms, l.tile = {config, split};
    launch_kernel(kernel, dtype, p, l);
    verify<<<64, 128>>>(p, w, dtype == DType::kHalf, false, verdicts + used);
    launch_sm80_unpack(dtype, w, nullptr);
    CHECK(cudaDeviceSynchronize());
    names.push_back("sanitize " + form_text(kernel, config, split));
    ++used;
    rows_case(dtype, w, first, count, false, static_cast<uint16_t*>(all[9]), 0);
    CHECK(cudaDeviceSynchronize());
    for (void* q : all) CHECK(cudaFree(q));
  }
}

// Microseconds of a call in a graph of calls, each with another weight, which together are more than 250 MB.
float time_us(int kernel, DType dtype, Params p, const Launch& l, cudaStream_t stream) {
  const int64_t codes = code_words(p.n, p.k), words = scale_words(p.n, p.k, p.group), bytes = 4 * (codes + words);
  const int64_t size_x = p.m * p.k, size_out = p.m * p.n;
  const int weights = static_cast<int>(std::min({(int64_t{260} << 20) / bytes + 1, kCodeWords / codes, kScaleWords / words}));
  const int calls = p.m >= 1024 ? 3 : std::max(weights, 6);
  const int count_x = static_cast<int>(std::min<int64_t>(calls, kArena / size_x));
  const int count_out = static_cast<int>(std::min<int64_t>(calls, kArena / size_out));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) {
    p.x = arena_x + i % count_x * size_x, p.out = arena_out + i % count_out * size_out;
    p.codes = arena_codes + i % weights * codes, p.scales = arena_words + i % weights * words;
    launch_kernel(kernel, dtype, p, l);
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  static cudaEvent_t e[2] = {};
  for (auto& x : e) {
    if (x == nullptr) CHECK(cudaEventCreate(&x));
  }
  float best = 1e30f;
  for (int r = 0; r < (p.m >= 1024 ? 3 : 5); ++r) {
    CHECK(cudaEventRecord(e[0], stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(e[1], stream));
    CHECK(cudaEventSynchronize(e[1]));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, e[0], e[1]));
    if (r > 0) best = std::min(best, ms * 1000.f / calls);
  }
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  return best;
}

bool plausible(int kernel, int config, int split, int64_t m, int64_t n, int64_t k) {
  if (split > 1 && k / kBlock / split < 4) return false;
  if (m > kKernels[kernel].most_rows(config)) return false;
  if (few(kernel, config)) return true;
  const int64_t tokens = kKernels[kernel].tokens(config), columns = kKernels[kernel].columns(config);
  const int64_t blocks = (m + tokens - 1) / tokens * ((n + columns - 1) / columns);
  if (split > 1 && (blocks * split > 8 * sms || mma_workspace_bytes(m, n, split) > kWorkspace)) return false;
  return tokens <= std::max<int64_t>(2 * m, 16) && tokens * (m >= 1024 ? 32 : 4) >= m && (m < 1024 || tokens >= 128);
}

// `all`: the time of every configuration, to fit the cost model to.
void timings(DType dtype, bool all) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  fill<<<1024, 256>>>(arena_x, 1, kArena, kArena, 1, 1.f, dtype == DType::kHalf);
  fill_words<<<1024, 256>>>(arena_codes, kCodeWords, 2);
  fill_scale_words<<<1024, 256>>>(arena_words, kScaleWords, 0.005f, dtype == DType::kHalf);
  CHECK(cudaDeviceSynchronize());
  constexpr int64_t kShapes[][2] = {{6144, 1024}, {1024, 3072}, {6144, 4096}, {4096, 4096}, {24576, 4096}, {4096, 12288}, {51200, 5120}, {8192, 8192}};
  printf("%s, groups of 64: the three best of every plausible configuration, us of a call by graphs over rotating weights\n", dtype_name(dtype));
  for (const Kernel& kernel : kKernels) printf("%s: %s, ", kernel.letter, kernel.name);
  printf("configuration/slices; in brackets GB/s of codes and scales, from m = 1024 TFLOP/s\n");
  struct Result {
    float us;
    int kernel, config, split;
  };
  for (const auto& shape : kShapes) for (int64_t m : {1, 8, 16, 32, 64, 128, 256, 1024, 4096}) {
    Params p;
    p.m = m, p.n = shape[0], p.k = p.x_stride = shape[1], p.out_stride = p.n, p.group = 64;
    const double bytes = 4.0 * (code_words(p.n, p.k) + scale_words(p.n, p.k, 64));
    printf("n=%-5ld k=%-5ld m=%-4ld", (long)p.n, (long)p.k, (long)m);
    for (int dependent = 0; dependent < (m >= 1024 || all ? 1 : 2); ++dependent) {
      std::vector<Result> results;
      for (const auto& [kernel, config, split] : all_forms()) {
        if (!plausible(kernel, config, split, m, p.n, p.k)) continue;
        Launch l;
        l.stream = stream, l.sm_count = sms, l.dependent = dependent, l.tile = {config, split};
        results.push_back({time_us(kernel, dtype, p, l, stream), kernel, config, split});
      }
      if (all) {
        for (const Result& r : results) printf(" %s %s/%d %.3f", kKernels[r.kernel].letter, name_of(r.kernel, r.config), r.split, r.us);
        continue;
      }
      std::sort(results.begin(), results.end(), [](const Result& a, const Result& b) { return a.us < b.us; });
      printf(" | %s", dependent ? "dep" : "plain");
      for (size_t i = 0; i < results.size() && i < 3; ++i) {
        const Result& r = results[i];
        printf("%s %.2f %s%s/%d", i ? "," : "", r.us, kKernels[r.kernel].letter, name_of(r.kernel, r.config), r.split);
        if (i == 0) printf(" (%.0f)", m >= 1024 ? 2.0 * m * p.n * p.k / r.us * 1e-6 : bytes / r.us * 1e-3);
      }
    }
    printf("\n");
    fflush(stdout);
  }
}

// Rows of the weight, up to 16 MB of them, each time from another one.
void rows_timings(DType dtype) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (const auto& shape : {std::array<int64_t, 2>{6144, 1024}, {1024, 3072}, {6144, 4096}, {4096, 4096}, {8192, 8192}}) for (int group : kGroups) {
    Params p;
    p.n = shape[0], p.k = shape[1], p.group = group;
    const int64_t codes = code_words(p.n, p.k), words = scale_words(p.n, p.k, group), count = std::min(p.n, (int64_t{16} << 20) / (2 * p.k));
    const int calls = static_cast<int>(std::min<int64_t>((int64_t{260} << 20) / (4 * (codes + words)) + 1, kCodeWords / codes));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) {
      p.codes = arena_codes + i * codes, p.scales = arena_words + i * words % (kScaleWords - words);
      Launch l;
      l.stream = stream, l.sm_count = sms;
      launch_sm80_dequantize(dtype, p, 0, count, arena_out, l);
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t e[2];
    for (auto& x : e) CHECK(cudaEventCreate(&x));
    float best = 1e30f;
    for (int r = 0; r < 5; ++r) {
      CHECK(cudaEventRecord(e[0], stream));
      CHECK(cudaGraphLaunch(exec, stream));
      CHECK(cudaEventRecord(e[1], stream));
      CHECK(cudaEventSynchronize(e[1]));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, e[0], e[1]));
      if (r > 0) best = std::min(best, ms * 1000.f / calls);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    const double weights = static_cast<double>(count) * static_cast<double>(p.k);
    printf("sm80_dequantize rows=%ld k=%ld group=%d: %.2f us (%.0f GB/s read and written)\n", (long)count, (long)p.k, group, best,
           weights * (2.5 + 4.0 / group) / best * 1e-3);
  }
}

// One configuration, for a profiler.
void one(char** arguments) {
  Params p;
  p.m = atol(arguments[3]), p.n = atol(arguments[4]), p.k = p.x_stride = atol(arguments[5]), p.out_stride = p.n, p.group = 64;
  fill<<<1024, 256>>>(arena_x, 1, p.m * p.k, p.m * p.k, 1, 1.f, true);
  fill_words<<<1024, 256>>>(arena_codes, kCodeWords, 2);
  fill_scale_words<<<1024, 256>>>(arena_words, kScaleWords, 0.005f, true);
  p.x = arena_x, p.out = arena_out, p.codes = arena_codes, p.scales = arena_words;
  for (int kernel = 0; kernel < kKernelCount; ++kernel) for (int config = 0; config < count_of(kernel); ++config) {
    if (kKernels[kernel].name != std::string(arguments[0]) || name_of(kernel, config) != std::string(arguments[1])) continue;
    Launch l;
    l.sm_count = sms, l.tile = {config, atoi(arguments[2])};
    for (int i = 0; i < 3; ++i) {
      poison<<<1024, 256>>>(reinterpret_cast<uint32_t*>(arena_out2), kArena / 2, 0u);  // takes L2
      launch_kernel(kernel, DType::kHalf, p, l);
    }
  }
  CHECK(cudaDeviceSynchronize());
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + t.tv_nsec * 1e-9;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "", word = argc > 2 ? argv[2] : "";
  int major = 0, minor = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  architecture = 10 * major + minor;
  CHECK(cudaMalloc(&verdicts, sizeof(Verdict) * kMaxCases));
  CHECK(cudaMemset(verdicts, 0, sizeof(Verdict) * kMaxCases));
  if (mode != "sanitize") {
    for (auto p : {&arena_x, &arena_out, &arena_out2}) CHECK(cudaMalloc(p, kArena * 2));
    CHECK(cudaMalloc(&arena_bias, 4 << 20));
    CHECK(cudaMalloc(&arena_qweight, 64 << 20));
    CHECK(cudaMalloc(&arena_scales, 16 << 20));
    CHECK(cudaMalloc(&arena_zeros, 8 << 20));
    CHECK(cudaMalloc(&arena_codes, kCodeWords * 4));
    CHECK(cudaMalloc(&arena_words, kScaleWords * 4));
    CHECK(cudaMalloc(&workspace, kWorkspace));
    CHECK(cudaMemset(workspace, 0xff, kWorkspace));
  }
  if (mode == "one" && argc == 8) return one(argv + 2), 0;
  if (mode.rfind("time", 0) != 0) {
    const double from = now();
    if (mode == "sanitize") {
      sanitize();
    } else {
      packing(), rows(), edges(), far_offsets(), chains(), again();
    }
    std::vector<Verdict> v(used);
    CHECK(cudaMemcpy(v.data(), verdicts, sizeof(Verdict) * used, cudaMemcpyDeviceToHost));
    int failed = 0;
    for (int i = 0; i < used; ++i) {
      const bool host = std::find(host_failures.begin(), host_failures.end(), i) != host_failures.end();
      if (!host && v[i].bad == 0 && v[i].guard == 0) continue;
      if (++failed <= 40) {
        printf("FAILED %s: %s%u wrong, first of them [%d, %d] = %g, not %g; %u guards overwritten\n", names[i].c_str(), host ? "on the host; " : "",
               v[i].bad, v[i].row, v[i].col, v[i].got, v[i].want, v[i].guard);
      }
    }
    printf("%d cases, %d failed, %.1f s\n", used, failed, now() - from);
    fflush(stdout);
    if (failed) return 1;
  }
  if (mode == "" || mode.rfind("time", 0) == 0) {
    const DType dtype = argc > 2 && std::string(argv[2]) == "bf16" ? DType::kBFloat16 : DType::kHalf;
    timings(dtype, word == "all"), rows_timings(dtype);
  }
  return 0;
}
