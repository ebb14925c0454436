// Runs rope, write_kv and qk_norm_rope_write_kv, without torch and Python, against a reference on the host, then times them.
//
//   rope_write_check [check|time]     nothing: both
//
// From the root of the repository:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -cudart static -I packages/dandan-core/src/dandan_ops_core/include
//        -I packages/dandan-attention/csrc packages/dandan-attention/benchmarks/rope_write_check.cu
//        packages/dandan-attention/csrc/decode/sm80_rope_write.cu -o rope_write_check
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "decode/rope_write.h"

using namespace dandan_attention;

#define CHECK(x)                                                                               \
  do {                                                                                         \
    const cudaError_t e_ = (x);                                                                \
    if (e_ != cudaSuccess) {                                                                   \
      printf("CUDA error %s at line %d: %s\n", cudaGetErrorString(e_), __LINE__, #x), exit(1); \
    }                                                                                          \
  } while (0)

namespace {

std::mt19937 engine(1);
int rnd(int n) { return static_cast<int>(engine() % n); }
float normal() {
  static std::normal_distribution<float> d;
  return d(engine);
}
uint16_t bits(float v, bool half) {
  return half ? static_cast<__half_raw>(__float2half_rn(v)).x : static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(v)).x;
}
float value(uint16_t v, bool half) {
  if (half) return __half2float(__half(__half_raw{v}));
  return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{v}));
}

// Memory that host and device share, in an allocation of its own.
template <typename T>
struct Shared {
  T* at = nullptr;
  int64_t size;
  explicit Shared(int64_t n, T fill = T{}) : size(n) {
    CHECK(cudaMallocManaged(&at, std::max<int64_t>(1, n) * sizeof(T)));
    std::fill(at, at + n, fill);
  }
  ~Shared() { cudaFree(at); }
  Shared(const Shared&) = delete;
};

int failed = 0;

void check_case(int seed) {
  engine.seed(seed);
  const bool half = rnd(2), with_q = rnd(5), with_v = rnd(5), norm = rnd(2), rope = rnd(4), cached = rnd(4), in_place = rnd(2), k_out = rnd(2) || !cached;
  const int d = 64 << rnd(3), hq = 1 + rnd(40), hk = 1 + rnd(9), tokens = 1 + rnd(90), heads = hq + 2 * hk;
  RopeWriteParams p;
  p.head_dim = d, p.num_heads_q = hq, p.num_heads_kv = hk, p.tokens = tokens;
  Shared<uint16_t> qkv(int64_t{tokens} * heads * d), q_out(int64_t{tokens} * hq * d, 0xabcd), new_k(int64_t{tokens} * hk * d, 0xabcd), wq(d), wk(d);
  for (int64_t i = 0; i < qkv.size; ++i) qkv.at[i] = bits(2 * normal(), half);
  for (int i = 0; i < d; ++i) wq.at[i] = bits(1 + normal() * 0.1f, half), wk.at[i] = bits(1 + normal() * 0.1f, half);
  const std::vector<uint16_t> before(qkv.at, qkv.at + qkv.size);
  p.q = with_q ? qkv.at : nullptr, p.k = qkv.at + hq * d, p.v = with_v ? qkv.at + (hq + hk) * d : nullptr;
  p.q_strides = p.k_strides = p.v_strides = {int64_t{heads} * d, d};
  p.q_out = in_place ? qkv.at : q_out.at, p.q_out_strides = in_place ? p.q_strides : TokenStrides{int64_t{hq} * d, d};
  p.k_out = !k_out ? nullptr : in_place ? qkv.at + hq * d : new_k.at, p.k_out_strides = in_place ? p.k_strides : TokenStrides{int64_t{hk} * d, d};
  if (norm) p.q_weight = wq.at, p.k_weight = wk.at;
  const int turned = rnd(2) ? d : 16 * (1 + rnd(d / 16)), angles = turned / 2, places = 50;
  Shared<float> cosine(places * (angles + 4)), sine(cosine.size);
  for (int64_t i = 0; i < cosine.size; ++i) cosine.at[i] = normal(), sine.at[i] = normal();
  Shared<int64_t> position(tokens), slot(tokens);
  Shared<int32_t> position32(tokens), slot32(tokens);
  p.rotary_dim = turned, p.interleaved = rnd(2), p.table_stride = angles + 4, p.max_positions = places;
  if (rope) p.cos = cosine.at, p.sin = sine.at;
  const int page = 1 + rnd(20), pages = (tokens + page - 1) / page + 2;
  std::vector<int> order(pages * page);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), engine);
  for (int t = 0; t < tokens; ++t) {
    position.at[t] = rnd(12) == 0 ? (rnd(2) ? -5 : 1000) : rnd(places), slot.at[t] = rnd(6) == 0 ? (rnd(2) ? -1 : pages * page + rnd(9)) : order[t];
    position32.at[t] = static_cast<int>(position.at[t]), slot32.at[t] = static_cast<int>(slot.at[t]);
  }
  p.positions_are_64 = rnd(2), p.slots_are_64 = rnd(2), p.page_size = page, p.num_pages = pages;
  p.positions = p.positions_are_64 ? static_cast<void*>(position.at) : position32.at;
  Shared<uint16_t> k_cache(int64_t{pages} * page * hk * d, 0x1111), v_cache(k_cache.size, 0x1111);
  PageStrides s;
  if (rnd(2)) s.head = d, s.slot = d * hk, s.page = s.slot * page;
  else s.slot = d, s.head = d * page, s.page = s.head * hk;
  p.k_cache_strides = p.v_cache_strides = s;
  if (cached) p.k_cache = k_cache.at, p.v_cache = v_cache.at, p.slot_mapping = p.slots_are_64 ? static_cast<void*>(slot.at) : slot32.at;
  CHECK(cudaDeviceSynchronize());
  launch_sm80_rope_write(half ? DType::kHalf : DType::kBFloat16, p, DecodeLaunch{});
  CHECK(cudaDeviceSynchronize());

  int bad = 0;
  const auto fail = [&](const char* what, int t, int h, int column, float got, float want) {
    if (bad++ == 0) {
      printf("FAILED %d: %s [%d, %d, %d] = %g, not %g; head_dim=%d rotary_dim=%d norm=%d rope=%d interleaved=%d in_place=%d\n", seed, what, t, h, column, got,
             want, d, turned, norm, rope, p.interleaved, in_place);
    }
  };
  std::vector<uint16_t> want_k(k_cache.size, 0x1111), want_v(k_cache.size, 0x1111);
  for (int t = 0; t < tokens; ++t) {
    for (int h = with_q ? 0 : hq; h < (with_v ? heads : hq + hk); ++h) {
      const int part = h < hq ? 0 : h < hq + hk ? 1 : 2;
      const int64_t from = (int64_t{t} * heads + h) * d;
      std::vector<float> x(d);
      for (int i = 0; i < d; ++i) x[i] = value(before[from + i], half);
      if (norm && part != 2) {
        double sum = 0;
        for (float f : x) sum += double{f} * f;
        const double scale = 1 / std::sqrt(sum / d + p.eps);
        for (int i = 0; i < d; ++i) x[i] = value(bits(static_cast<float>(x[i] * scale * value((part ? wk : wq).at[i], half)), half), half);
      }
      std::vector<float> r = x;
      const int64_t place = std::min<int64_t>(std::max<int64_t>(position.at[t], 0), places - 1) * p.table_stride;
      for (int i = 0; rope && part != 2 && i < angles; ++i) {
        const int a = p.interleaved ? 2 * i : i, b = p.interleaved ? 2 * i + 1 : i + angles;
        const float c = cosine.at[place + i], n = sine.at[place + i];
        volatile float ac = x[a] * c, bn = x[b] * n, bc = x[b] * c, an = x[a] * n;  // no fused multiply-add
        r[a] = ac - bn, r[b] = bc + an;
      }
      float largest = 0;
      for (float f : r) largest = std::max(largest, std::fabs(f));
      const auto compare = [&](uint16_t got, int column, const char* what) {
        if (got == bits(r[column], half)) return;
        // A norm adds in another order: now and then its rounding goes the other way.
        if (norm && part != 2 && std::fabs(value(got, half) - r[column]) <= (half ? 0x1p-8f : 0x1p-5f) * largest) return;
        fail(what, t, h, column, value(got, half), r[column]);
      };
      for (int i = 0; i < d; ++i) {
        if (part == 0) compare(static_cast<uint16_t*>(p.q_out)[t * p.q_out_strides.token + h * p.q_out_strides.head + i], i, "q");
        if (part == 1 && k_out) compare(static_cast<uint16_t*>(p.k_out)[t * p.k_out_strides.token + (h - hq) * p.k_out_strides.head + i], i, "k");
        if (part >= 1 && cached && slot.at[t] >= 0 && slot.at[t] < pages * page) {
          const int64_t to = slot.at[t] / page * s.page + slot.at[t] % page * s.slot + (h - hq - (part - 1) * hk) * s.head + i;
          const uint16_t got = (part == 1 ? k_cache : v_cache).at[to];
          compare(got, i, part == 1 ? "k_cache" : "v_cache");
          (part == 1 ? want_k : want_v)[to] = got;
        }
        const bool written = in_place && (part == 0 || (part == 1 && k_out));
        if (!written && qkv.at[from + i] != before[from + i]) fail("an input changed", t, h, i, 0, 0);
      }
    }
  }
  if (std::memcmp(k_cache.at, want_k.data(), want_k.size() * 2) != 0 || std::memcmp(v_cache.at, want_v.data(), want_v.size() * 2) != 0) {
    fail("a slot of nobody changed", 0, 0, 0, 0, 0);
  }
  failed += bad > 0;
}

// Microseconds on an H200 of vLLM, taken in another run: fused_qknorm_rope_cache, rotary alone, write alone. For orientation.
struct Peer {
  int tokens;
  float fused, rotary, write;
};
constexpr Peer kPeers[] = {{1, 3.2f, 2.8f, 2.1f}, {64, 5.2f, 3.0f, 2.3f}, {256, 11.5f, 3.7f, 2.7f}, {1024, 31.4f, 13.2f, 6.0f}, {8192, 212, 97, 46}};

void timings() {
  constexpr int kQ = 32, kKv = 8, kD = 128, kHeads = kQ + 2 * kKv, kPositions = 8192, kMost = 8192, kSets = 16;
  uint16_t *qkv, *out, *k_cache, *v_cache, *weight;
  float *cosine, *sine;
  int64_t *positions, *slots;
  const int64_t set = int64_t{kMost} * kHeads * kD, cache = int64_t{kMost} * kKv * kD;
  CHECK(cudaMalloc(&qkv, set * kSets * 2));
  CHECK(cudaMalloc(&out, set * kSets * 2));
  CHECK(cudaMalloc(&k_cache, cache * kSets * 2));
  CHECK(cudaMalloc(&v_cache, cache * kSets * 2));
  CHECK(cudaMalloc(&weight, kD * 2));
  CHECK(cudaMalloc(&cosine, kPositions * kD * 2));
  CHECK(cudaMalloc(&sine, kPositions * kD * 2));
  CHECK(cudaMalloc(&positions, kMost * 8));
  CHECK(cudaMalloc(&slots, kMost * 8));
  CHECK(cudaMemset(qkv, 0x3c, set * kSets * 2));
  CHECK(cudaMemset(weight, 0x3c, kD * 2));
  CHECK(cudaMemset(cosine, 0, kPositions * kD * 2));
  CHECK(cudaMemset(sine, 0, kPositions * kD * 2));
  std::vector<int64_t> numbers(kMost);
  for (int i = 0; i < kMost; ++i) numbers[i] = (i * 2477) % kMost;
  CHECK(cudaMemcpy(positions, numbers.data(), kMost * 8, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(slots, numbers.data(), kMost * 8, cudaMemcpyHostToDevice));
  cudaStream_t stream;
  cudaEvent_t e[2];
  CHECK(cudaStreamCreate(&stream));
  for (auto& event : e) CHECK(cudaEventCreate(&event));
  printf("bfloat16, heads 32/8, head_dim 128: us, speed over vLLM, share of the bytes at 4.2 TB/s\n");
  for (const Peer& peer : kPeers) {
    for (int what = 0; what < 3; ++what) {
      const int64_t own = int64_t{peer.tokens} * kHeads * kD, own_cache = int64_t{peer.tokens} * kKv * kD;
      const int copies = static_cast<int>(std::min<int64_t>(128, set * kSets / own)), calls = std::max(24, copies);
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < calls; ++i) {
        RopeWriteParams p;
        uint16_t *const from = qkv + i % copies * own, *const to = out + i % copies * own;
        p.tokens = peer.tokens, p.head_dim = kD, p.num_heads_q = kQ, p.num_heads_kv = kKv;
        p.k = from + kQ * kD, p.k_strides = p.q_strides = p.v_strides = {kHeads * kD, kD};
        if (what != 2) p.q = from, p.q_out = what == 0 ? to : from, p.q_out_strides = what == 0 ? TokenStrides{kQ * kD, kD} : p.q_strides;
        if (what != 2) p.cos = cosine, p.sin = sine, p.positions = positions, p.positions_are_64 = true, p.rotary_dim = kD, p.table_stride = kD / 2;
        p.max_positions = kPositions;
        if (what == 1) p.k_out = from + kQ * kD, p.k_out_strides = p.k_strides;
        if (what == 0) p.q_weight = p.k_weight = weight;
        if (what != 1) {
          p.v = from + (kQ + kKv) * kD, p.slot_mapping = slots, p.slots_are_64 = true, p.page_size = 64, p.num_pages = kMost / 64;
          p.k_cache = k_cache + i % std::min(copies, kSets) * cache, p.v_cache = v_cache + i % std::min(copies, kSets) * cache;
          p.k_cache_strides = p.v_cache_strides = {64 * kKv * kD, kKv * kD, kD};
        }
        DecodeLaunch l;
        l.stream = stream;
        launch_sm80_rope_write(DType::kBFloat16, p, l);
      }
      CHECK(cudaStreamEndCapture(stream, &graph));
      CHECK(cudaGraphInstantiate(&exec, graph, 0));
      std::vector<float> us;
      for (int round = 0; round < 12; ++round) {
        CHECK(cudaEventRecord(e[0], stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(e[1], stream));
        CHECK(cudaEventSynchronize(e[1]));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, e[0], e[1]));
        if (round >= 3) us.push_back(ms * 1000.f / calls);
      }
      std::sort(us.begin(), us.end());
      const float t = us[us.size() / 2], peer_us = what == 0 ? peer.fused : what == 1 ? peer.rotary : peer.write;
      const double bytes = 4.0 * (what == 0 ? static_cast<double>(own) : what == 1 ? own - own_cache : 2.0 * own_cache);
      printf("%5d tokens %-6s %7.2f us  %.2fx  %.2f\n", peer.tokens, what == 0 ? "fused" : what == 1 ? "rope" : "write", t, peer_us / t, bytes / 4.2e6 / t);
      CHECK(cudaGraphExecDestroy(exec));
      CHECK(cudaGraphDestroy(graph));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode != "time") {
    constexpr int kCases = 300;
    for (int i = 0; i < kCases; ++i) check_case(i);
    printf("%d cases, %d failed\n", kCases, failed);
    fflush(stdout);
    if (failed) return 1;
  }
  if (mode != "check") timings();
  return 0;
}
