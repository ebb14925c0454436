// Which kernel and tile a call takes: a pure function of architecture, dtype, shape and layout. No torch, no CUDA; runs without a GPU.
//
// Every kernel has a table of named configurations, in configs.h. for_each_candidate() walks kernel, configuration and slices of K, cost_us() estimates the
// time of each on the GPU, and the cheapest wins. Order of `auto`: a profile row; the cheapest own candidate, also on an architecture that was never
// measured, since PyTorch has no such product; torch where no own kernel can run. `cuda` is the cheapest own candidate, a kernel's name the cheapest of
// that kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>

#include "configs.h"
#include "w4a16.h"

namespace dandan_w4a16 {

// The numbers are those of the `backend` argument of the operators.
enum class Backend : int { kAuto = 0, kTorch = 1, kCuda = 2, kSm80Decode = 3, kSm90Decode = 4, kSm80Mma = 5, kSm90aWgmma = 6, kSm80Dequantize = 7 };
inline constexpr const char* kBackendNames[] = {"auto", "torch", "cuda", "sm80_decode", "sm90_decode", "sm80_mma", "sm90a_wgmma", "sm80_dequantize"};
inline constexpr int kBackendCount = 8;
inline constexpr int kFirstKernel = 3;
inline constexpr const char* backend_name(Backend b) { return kBackendNames[static_cast<int>(b)]; }

inline constexpr int kMeasuredArchitectures[] = {90};

// ---------------------------------------------------------------- configurations

// One way of a kernel to cut the problem, as the cost model sees it. Its number, Tile::config, is its place in the kernel's table in configs.h.
struct Config {
  const char* name = "";
  int64_t tile_m = 0, tile_n = 0;  // of x's rows and out's columns that a block has at a time; of K it has 64
  unsigned splits = 0b10;          // bit s: K may be cut into s slices for different blocks
  bool clusters = true;            // slices are blocks of a cluster, which add their sums themselves
  int blocks = 1;                  // resident on a multiprocessor at a time
  int blocks_few_rows = 1;         // the same with up to 8 rows
  int warps = 0, halves = 1;       // decode: see DecodeShape and RingShape
  int consumers = 0;               // wgmma: see WgmmaShape
  double factor = 1;               // what the cost model is off by for this configuration
};

inline constexpr int kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16};  // that are tried
inline constexpr bool takes_split(const Config& config, int64_t split) { return split >= 1 && split < 32 && (config.splits >> split & 1) != 0; }
inline constexpr int max_split(const Config& config) {
  int most = 1;
  for (int s = 1; s < 32; ++s) most = takes_split(config, s) ? s : most;
  return most;
}
inline constexpr unsigned splits_up_to(int most) {
  unsigned bits = 0;
  for (const int split : kSplits) bits |= split <= most ? 1u << split : 0u;
  return bits;
}

// Blocks that share a multiprocessor of an H200: by shared memory, by registers and by threads.
inline constexpr int resident(int shared_bytes, int threads, int registers) {
  const int blocks = std::min({227 * 1024 / (shared_bytes + 1024), 65536 / (threads * registers), 2048 / threads});
  return blocks < 1 ? 1 : blocks;
}

// What the estimates of each configuration are off by, fitted with them; in the order of the shapes of configs.h.
inline constexpr double kDecodeFactors[] = {0.86, 0.93, 0.94, 1.07, 1.01, 1.02};
inline constexpr double kRingFactors[] = {0.67, 0.85, 0.83, 0.91, 0.88, 0.85, 0.96, 1.09, 0.94, 1.01};
inline constexpr double kMmaFactors[] = {1.28, 1.14, 1.03, 1.14, 0.97, 0.81, 0.83, 0.75};
inline constexpr double kWgmmaFactors[] = {1.17, 1.19, 1.13, 1.02, 1.08, 0.71, 0.82, 0.67, 1.35, 1.28, 0.90, 0.69};
static_assert(std::size(kDecodeFactors) == kDecodeShapeCount && std::size(kRingFactors) == kRingShapeCount && std::size(kMmaFactors) == kMmaShapeCount &&
              std::size(kWgmmaFactors) == kWgmmaShapeCount);

// The rings of x or the sums of the warps in shared memory; codes and scales in flight, sums and rows of x in registers.
inline constexpr int decode_blocks(const DecodeShape& s, int halves) {
  const int kept = s.depth * s.tiles * 6 + s.tiles * halves * 4 + 8 * halves;
  return resident(std::max(s.warps * s.depth * halves * 1024, s.tiles * halves * 512 * s.warps), 32 * s.warps, std::min(255, kept * 18 / 10 + 8));
}

inline constexpr Config decode_config(const DecodeShape& s, double factor) {
  Config c;
  c.name = s.name;
  c.tile_m = kMaxDecodeRows, c.tile_n = 16 * s.tiles;
  c.splits = splits_up_to(kMaxDecodeSplit);
  c.blocks = decode_blocks(s, 2);
  c.blocks_few_rows = decode_blocks(s, 1);
  c.warps = s.warps;
  c.factor = factor;
  return c;
}

inline constexpr Config ring_config(const RingShape& s, double factor) {
  Config c;
  c.name = s.name;
  c.tile_m = s.tokens, c.tile_n = 16 * s.tiles;
  c.splits = splits_up_to(kMaxRingSplit);
  c.blocks = c.blocks_few_rows = s.resident;
  c.warps = s.warps;
  c.halves = s.halves;
  c.factor = factor;
  return c;
}

// Codes, scales and zero points of 64 rows by 64 k, with groups of 64 or more.
inline constexpr int kWeightBlockBytes = 2048 + 256;

inline constexpr Config mma_config(const MmaShape& s, double factor) {
  Config c;
  c.name = s.name;
  c.tile_m = s.tokens, c.tile_n = s.columns;
  c.splits = splits_up_to(kMaxMmaSplit);
  c.clusters = false;
  c.blocks = resident(s.stages * (s.tokens * 128 + s.columns / kBlock * kWeightBlockBytes), s.threads(), s.warp_tokens * s.warp_columns / 32 + 90);
  c.warps = s.threads() / 32;
  c.factor = factor;
  return c;
}

inline constexpr Config wgmma_config(const WgmmaShape& s, double factor) {
  const int stage = (s.tokens * 128 + s.consumers * kWeightBlockBytes + 1023) / 1024 * 1024;
  Config c;
  c.name = s.name;
  c.tile_m = s.tokens, c.tile_n = 64 * s.consumers;
  c.splits = s.splits;
  // More than 128 tokens: the copying warp has a group of its own, and all three share the registers of one block.
  const bool group = s.tokens > 128;
  c.blocks = resident(s.stages * stage, 128 * s.consumers + (group ? 128 : 32), group ? 168 : s.tokens / 2 + 40);
  c.consumers = s.consumers;
  c.factor = factor;
  return c;
}

inline constexpr Config dequantize_config() {
  Config c;
  c.name = "rows";
  c.tile_m = c.tile_n = 128;  // torch's choice
  return c;
}

template <int kCount>
struct Configs {
  Config configs[kCount];
};

template <typename Shape, int kCount>
inline constexpr Configs<kCount> make_table(const Shape (&shapes)[kCount], const double (&factors)[kCount], Config (*config)(const Shape&, double)) {
  Configs<kCount> table;
  for (int i = 0; i < kCount; ++i) table.configs[i] = config(shapes[i], factors[i]);
  return table;
}

inline constexpr auto kSm80DecodeTable = make_table(kDecodeShapes, kDecodeFactors, decode_config);
inline constexpr auto kSm90DecodeTable = make_table(kRingShapes, kRingFactors, ring_config);
inline constexpr auto kSm80MmaTable = make_table(kMmaShapes, kMmaFactors, mma_config);
inline constexpr auto kSm90aWgmmaTable = make_table(kWgmmaShapes, kWgmmaFactors, wgmma_config);
inline constexpr Config kSm80DequantizeTable[] = {dequantize_config()};

struct ConfigTable {
  const Config* configs;
  int count;
};

inline constexpr ConfigTable configs_of(Backend kernel) {
  switch (kernel) {
    case Backend::kSm80Decode: return {kSm80DecodeTable.configs, static_cast<int>(std::size(kSm80DecodeTable.configs))};
    case Backend::kSm90Decode: return {kSm90DecodeTable.configs, static_cast<int>(std::size(kSm90DecodeTable.configs))};
    case Backend::kSm80Mma: return {kSm80MmaTable.configs, static_cast<int>(std::size(kSm80MmaTable.configs))};
    case Backend::kSm90aWgmma: return {kSm90aWgmmaTable.configs, static_cast<int>(std::size(kSm90aWgmmaTable.configs))};
    case Backend::kSm80Dequantize: return {kSm80DequantizeTable, static_cast<int>(std::size(kSm80DequantizeTable))};
    default: return {nullptr, 0};
  }
}

// Number of the configuration of that name, or -1.
inline int config_number(Backend kernel, const std::string& name) {
  const ConfigTable table = configs_of(kernel);
  for (int i = 0; i < table.count; ++i) {
    if (name == table.configs[i].name) return i;
  }
  return -1;
}

// ---------------------------------------------------------------- a problem

// A row of a route table: a kernel, and its configuration and slices where the row names them.
struct Choice {
  Backend kernel = Backend::kAuto;  // kAuto: there is no row
  int config = -1, split = 0;
  bool operator==(const Choice&) const = default;
};

struct Problem {
  int arch = 0;           // of the device
  int code_arch = 0;      // of the code in this library that the device runs; 0: none
  bool own_code = false;  // this library has machine code with the instructions of this architecture alone (90a)
  int sm_count = 0;
  DType dtype = DType::kHalf;
  int64_t m = 0, n = 0, k = 0;  // k is a multiple of 8
  int group = 64;
  bool canonical = false;        // the weight is not in the kernels' order: each call puts it there
  bool integer_zeros = true;     // of a canonical weight
  bool scales_fit = false;       // scales have the dtype of x
  bool bias = false;             // there is one
  bool bias_fits = false;        // there is none, or it has the dtype of x
  bool weight_in_place = false;  // codes and scales are contiguous from a multiple of 16 bytes
  int64_t copied = 0;  // elements of x and out that are copied around the kernel
  int copies = 0;      // and how many tensors are copied
  Backend backend = Backend::kAuto;
  Choice forced;       // for tests and measurements: this and nothing else
  Choice profile;
  bool operator==(const Problem&) const = default;
};

struct Route {
  Backend kernel = Backend::kTorch;
  Tile tile;
  double us = 0;              // estimated; 0 where nothing was
  const char* reason = "";
  const char* fallback = "";  // why not an own kernel, when auto takes torch
  bool profile = false;
  std::string error;          // not empty: an explicit choice that cannot run, and what would
};

inline constexpr int64_t ceil_div(int64_t value, int64_t step) { return (value + step - 1) / step; }

// Why no own kernel can take the call, whatever its rows, or nullptr.
inline const char* common_obstacle(const Problem& p) {
  if (p.code_arch == 0) return "this build has no code for the device's architecture";
  if (p.code_arch < 80) return "it needs sm_80 or later";
  if (!p.integer_zeros) return "zeros are no integers";
  if (!p.scales_fit) return "scales have another dtype than x";
  if (!p.bias_fits) return "bias has another dtype than x";
  if (!p.weight_in_place) return "codes or scales are not contiguous from a multiple of 16 bytes";
  if (std::max({p.m, p.n, p.k}) > 0x7fffffff) return "a dimension does not fit 32-bit coordinates";
  return nullptr;
}

// Bytes of workspace that a call may take: for rows of a weight (of n) that w4a16_linear puts in order at a time, for a dequantised weight, for the sums
// of slices of K.
inline constexpr int64_t kWorkspaceBytes = int64_t{16} << 20;

// Why `kernel` cannot take the call, or nullptr. kCuda: any of them, which is what sm80_mma is.
inline const char* obstacle(Backend kernel, const Problem& p) {
  if (const char* why = common_obstacle(p)) return why;
  switch (kernel) {
    case Backend::kSm80Decode: return p.m <= kMaxDecodeRows ? nullptr : "x has more than 16 rows";
    case Backend::kSm90Decode:
      if (p.code_arch < 90) return "bulk copies need sm_90 or later";
      if (p.arch / 10 == 12) return "its rings need more shared memory than a block of sm_12x has";
      return p.m <= kMaxRingRows ? nullptr : "x has more than 64 rows";
    case Backend::kSm90aWgmma: return p.own_code ? nullptr : "wgmma needs a device of sm_90 and a build with code for sm_90a";
    case Backend::kSm80Dequantize:
      if (p.canonical) return "the weight is not in the kernels' order";
      if (p.bias) return "torch's product may round before it adds a bias";
      return 2 * p.n * p.k <= kWorkspaceBytes ? nullptr : "the dequantised weight is larger than 16 MiB";
    default: return nullptr;
  }
}

// Rows (of n) that w4a16_linear puts in order at a time.
inline constexpr int64_t slab_rows(int64_t n, int64_t k, int group) {
  const int64_t block = 4 * (code_words(kBlock, k) + scale_words(kBlock, k, group));
  return std::min(n, std::max<int64_t>(1, kWorkspaceBytes / block) * kBlock);
}

// Tiles of the result; a double, since sizes are checked with it.
inline double tiles_of(const Config& config, const Problem& p) {
  return static_cast<double>(ceil_div(p.m, config.tile_m)) * static_cast<double>(ceil_div(p.n, config.tile_n));
}

inline constexpr const char* kTooManyTiles = "there are too many tiles for one grid";

// Why a configuration of a kernel that can take the call cannot with so many slices of K, or nullptr.
inline const char* config_obstacle(const Config& config, int split, const Problem& p) {
  if (!takes_split(config, split)) return "the configuration does not take that many slices";
  if (config.warps > 0 && config.clusters && p.m > config.tile_m) return "x has more rows than the configuration takes";
  if (split > 1 && split > ceil_div(p.k, kBlock)) return "K has fewer blocks of 64 than that many slices";
  if (split > 1 && config.clusters && p.code_arch < 90) return "slices need clusters, from sm_90";
  const double sums = config.clusters || split == 1 ? 0.0 : 4.0 * split * static_cast<double>(p.m) * static_cast<double>(p.n);
  if (sums > static_cast<double>(kWorkspaceBytes)) return "the sums of the slices take more than 16 MiB";
  if (tiles_of(config, p) * split > 0x7fffffff) return kTooManyTiles;
  return nullptr;
}

// ---------------------------------------------------------------- the cost model

// Microseconds, bytes and FLOPs of an H200 (132 multiprocessors). The forms are physics, the numbers fitted to the times of every configuration there
// (2026-12: some 2,600 timings on 8 layers of models, 1 to 4096 rows): the configuration that the estimates pick is 4% behind the fastest on average.

inline constexpr double kClock = 1750.0, kDramBytes = 4.6e6;  // of a microsecond

// Bytes of the weight, x and out, once each.
inline double operand_bytes(const Problem& p) {
  return 4.0 * static_cast<double>(code_words(p.n, p.k) + scale_words(p.n, p.k, p.group)) +
         2.0 * static_cast<double>(p.m) * (static_cast<double>(p.k) + static_cast<double>(p.n));
}

// Share of the memory's rate: too few blocks do not fill the memory's time.
inline double filled(double have, double enough) { return have >= enough ? 1.0 : std::sqrt(std::max(have, 1.0) / enough); }

// Clusters do not fill every multiprocessor: 30 of four, some 38 of three blocks that need one each.
inline double usable_multiprocessors(const Config& config, int split, const Problem& p) {
  return p.sm_count * (!config.clusters || split <= 2 ? 1.0 : split >= 4 ? 120.0 / 132 : 114.0 / 132);
}

// Three things that overlap, but not wholly.
inline double together(double a, double b, double c, double power) {
  return std::pow(std::pow(a, power) + std::pow(b, power) + std::pow(c, power), 1.0 / power);
}

// Blocks of the busiest multiprocessor, how many of them run at a time, and how often that happens.
struct Rounds {
  double at_a_time, count;
};
inline Rounds rounds_of(double blocks, double multiprocessors, int resident_blocks) {
  const double most = std::ceil(blocks / multiprocessors), at_a_time = std::min<double>(resident_blocks, most);
  return {at_a_time, most / at_a_time};
}

// Warps that take blocks of 64 k in turn: the bytes; the instructions that make and multiply weights, for `tile` of 16 columns `codes` clocks and `tokens`
// for 8 tokens, `step` for a block of 64 k, of as many warps as a scheduler has, `few` of them at least; x once for every block through L2.
struct DecodeCost {
  double launch, block, codes, tokens, step, few, l2, dram, power, cluster;
};
inline constexpr DecodeCost kDecodeCost = {0.2, 2.84, 1, 40, 113, 2.68, 16.8, 1.1, 1.6, 0.843};
inline constexpr DecodeCost kRingCost = {0.2, 3.05, 44.5, 26.2, 182, 1.93, 9.43, 1.1, 1.69, 1.71};

inline double decode_us(const DecodeCost& cost, const Config& config, int split, const Problem& p) {
  const int64_t tiles = ceil_div(p.n, config.tile_n);
  int halves = config.halves;
  while (8 * halves < p.m) halves *= 2;
  const double blocks = static_cast<double>(tiles) * split;
  const Rounds rounds = rounds_of(blocks, usable_multiprocessors(config, split, p), p.m <= 8 ? config.blocks_few_rows : config.blocks);
  const double steps = static_cast<double>(ceil_div(ceil_div(p.k, kBlock), config.warps * split));
  const double step = static_cast<double>(config.tile_n) / 16 * (cost.codes + cost.tokens * halves) + cost.step;
  const double work = rounds.count * steps * std::max(rounds.at_a_time * config.warps / 4, cost.few) * step / kClock;
  const double memory = operand_bytes(p) / (kDramBytes * cost.dram);
  const double rows = 2.0 * static_cast<double>(tiles) * static_cast<double>(p.m) * static_cast<double>(p.k) / (cost.l2 * 1e6);
  const double us = cost.launch + cost.block * std::sqrt(rounds.count) + together(memory, work, rows, cost.power) + (split > 1 ? cost.cluster : 0.0);
  return config.factor * us * (split > 1 && tiles >= p.sm_count ? 1.3 : 1.0);  // slices that no multiprocessor waits for
}

// Blocks of tokens by columns: a slice of 64 k costs a multiprocessor `rate` of what the tensor cores need, or `codes` clocks for each warp that makes
// weights of it; a block alone `wait` clocks more; a tile `block`, and `tile` for 128 x 128.
struct TileCost {
  double launch, block, tile, codes, rate, wait, dram, power, slices, l2;
};
inline constexpr TileCost kWgmmaCost = {0.2, 2.51, 1.56, 162, 1.57, 167, 1.1, 2, 0.147, 10.3};
inline constexpr TileCost kMmaCost = {1.06, 0.631, 3.61, 209, 1.33, 135, 1.1, 1.9, 1.45, 40};

// `multiply`: clocks of the tensor cores for a slice of 64 k of one block; `makers`: those that make weights in turn; `sums`: bytes of the sums of slices.
inline double tile_us(const TileCost& cost, const Config& config, int split, const Problem& p, double multiply, double makers, double sums) {
  const double tiles = tiles_of(config, p), blocks = tiles * split;
  const Rounds rounds = rounds_of(blocks, usable_multiprocessors(config, split, p), config.blocks);
  const double steps = static_cast<double>(ceil_div(ceil_div(p.k, kBlock), split));
  const double shared = rounds.at_a_time * std::max(multiply * cost.rate, makers * cost.codes);
  const double step = std::max(shared, multiply / std::max(config.consumers, 1) * cost.rate + cost.wait);
  const double memory = operand_bytes(p) * (config.consumers > 0 && p.m > config.tile_m ? 1.05 : 1.0) / (kDramBytes * cost.dram * filled(blocks, 100.0));
  const double rows = 2.0 * tiles * static_cast<double>(config.tile_m) * static_cast<double>(padded(p.k)) / (cost.l2 * 1e6);
  const double size = static_cast<double>(config.tile_m) * static_cast<double>(config.tile_n) / 16384.0;
  return config.factor * (cost.launch + (cost.block + cost.tile * size) * std::ceil(rounds.count) +
                          together(memory + sums / 7.0e6, rounds.count * steps * step / kClock, rows, cost.power));
}

inline double wgmma_us(const Config& config, int split, const Problem& p) {
  const double multiply = 2.0 * static_cast<double>(config.tile_m) * config.consumers;
  return tile_us(kWgmmaCost, config, split, p, multiply, config.consumers, 0.0) + kWgmmaCost.slices * (split - 1);
}

inline double mma_us(const Config& config, int split, const Problem& p) {
  const double multiply = static_cast<double>(config.tile_m) * static_cast<double>(config.tile_n) / 16.0;
  const double sums = split > 1 ? 8.0 * split * static_cast<double>(p.m) * static_cast<double>(p.n) : 0.0;
  return tile_us(kMmaCost, config, split, p, multiply, config.warps / 4.0, sums) + (split > 1 ? kMmaCost.slices : 0.0);
}

// sm80_dequantize: the weight read and written, then torch's product; the second reads it from L2.
inline double dequantize_us(const Problem& p) {
  const double weights = static_cast<double>(p.n) * static_cast<double>(p.k), flops = 2.0 * static_cast<double>(p.m) * weights;
  const double product = std::max({operand_bytes(p) / 4.0e6, flops / (0.72 * 989.0e6 * p.sm_count / 132), 1.3e-3 * static_cast<double>(p.k)});
  return 1.2 + (0.5 + 4.0 / p.group + 2.0) * weights / 4.4e6 + 3.3 + product;
}

inline double cost_us(Backend kernel, const Config& config, int split, const Problem& p) {
  // Copies around the kernel: a launch each, read and written.
  const double copies = 1.6 * p.copies + 4.0 * static_cast<double>(p.copied) / kDramBytes;
  switch (kernel) {
    case Backend::kSm80Decode: return copies + decode_us(kDecodeCost, config, split, p);
    case Backend::kSm90Decode: return copies + decode_us(kRingCost, config, split, p);
    case Backend::kSm80Mma: return copies + mma_us(config, split, p);
    case Backend::kSm80Dequantize: return copies + dequantize_us(p);
    default: return copies + wgmma_us(config, split, p);
  }
}

struct Candidate {
  Backend kernel;
  int config;
  int split;
  double us;
};

// Calls f with every candidate of `kernel` that can run.
template <typename F>
void for_each_candidate(Backend kernel, const Problem& p, F&& f) {
  if (obstacle(kernel, p) != nullptr) return;
  const ConfigTable table = configs_of(kernel);
  for (int i = 0; i < table.count; ++i) {
    const Config& config = table.configs[i];
    for (const int split : kSplits) {
      if (config_obstacle(config, split, p) == nullptr) f(Candidate{kernel, i, split, cost_us(kernel, config, split, p)});
    }
  }
}

// The cheapest candidate of one kernel, or of all for kCuda; kernel kTorch when there is none. Of equal ones the first.
inline Candidate cheapest(Backend kernel, const Problem& p) {
  Candidate best{Backend::kTorch, 0, 1, 0.0};
  const int first = kernel == Backend::kCuda ? kFirstKernel : static_cast<int>(kernel);
  const int last = kernel == Backend::kCuda ? kBackendCount - 1 : static_cast<int>(kernel);
  for (int i = first; i <= last; ++i) {
    for_each_candidate(static_cast<Backend>(i), p, [&](const Candidate& c) {
      if (best.kernel == Backend::kTorch || c.us < best.us) best = c;
    });
  }
  return best;
}

// ---------------------------------------------------------------- the choice

inline const char* kernel_reason(Backend kernel) {
  switch (kernel) {
    case Backend::kSm80Decode: return "estimated to be the fastest: few rows, mma.sync, bound by the bytes of the weight";
    case Backend::kSm90Decode: return "estimated to be the fastest: few rows, bulk copies and mma.sync, bound by the bytes of the weight";
    case Backend::kSm80Mma: return "estimated to be the fastest: weights made in registers, mma.sync";
    case Backend::kSm90aWgmma: return "estimated to be the fastest: weights made in registers, wgmma";
    case Backend::kSm80Dequantize: return "estimated to be the fastest: the weight dequantised into workspace for this call, then torch's product";
    default: return "";
  }
}

// Whether a profile row can be followed.
inline bool usable(const Choice& choice, const Problem& p) {
  if (choice.kernel == Backend::kTorch) return true;
  if (choice.kernel == Backend::kAuto || obstacle(choice.kernel, p) != nullptr) return false;
  if (choice.config < 0) return cheapest(choice.kernel, p).kernel == choice.kernel;
  return config_obstacle(configs_of(choice.kernel).configs[choice.config], choice.split, p) == nullptr;
}

inline Route take(const Candidate& candidate, const char* reason) {
  Route route;
  route.kernel = candidate.kernel;
  route.tile = {candidate.config, candidate.split};
  route.us = candidate.us;
  route.reason = reason;
  return route;
}

inline Route take(const Choice& choice, const Problem& p, const char* reason) {
  if (choice.kernel == Backend::kTorch) return take(Candidate{Backend::kTorch, 0, 1, 0.0}, reason);
  if (choice.config < 0) return take(cheapest(choice.kernel, p), reason);
  const Config& config = configs_of(choice.kernel).configs[choice.config];
  return take(Candidate{choice.kernel, choice.config, choice.split, cost_us(choice.kernel, config, choice.split, p)}, reason);
}

inline Route refuse(const Problem& p, Backend asked, const char* why, Backend instead) {
  Route route;
  route.error = std::string(p.canonical ? "w4a16_linear" : "packed_linear") + ": backend \"" + backend_name(asked) + "\" cannot run: " + why +
                "; \"auto\" and \"torch\" can";
  if (instead != Backend::kTorch) route.error += std::string(", and so can \"") + backend_name(instead) + "\"";
  return route;
}

inline bool measured(int arch) {
  return std::find(std::begin(kMeasuredArchitectures), std::end(kMeasuredArchitectures), arch) != std::end(kMeasuredArchitectures);
}

// Of packed_linear, and of w4a16_linear for so many rows of n as it puts in order at a time.
inline Route select(const Problem& p) {
  if (p.forced.kernel != Backend::kAuto) {
    const char* why = obstacle(p.forced.kernel, p);
    if (why == nullptr) why = config_obstacle(configs_of(p.forced.kernel).configs[p.forced.config], p.forced.split, p);
    if (why != nullptr) return refuse(p, p.forced.kernel, why, Backend::kTorch);
    return take(p.forced, p, "asked for");
  }
  if (p.backend == Backend::kTorch) return take(Choice{Backend::kTorch}, p, "asked for");
  const Candidate best = cheapest(p.backend == Backend::kAuto ? Backend::kCuda : p.backend, p);
  if (p.backend == Backend::kAuto) {
    if (usable(p.profile, p)) {
      Route route = take(p.profile, p, "a profile row names it");
      route.profile = true;
      return route;
    }
    if (best.kernel != Backend::kTorch) {
      return take(best, measured(p.arch) ? kernel_reason(best.kernel) : "no measurements on this architecture, and PyTorch has no such product");
    }
    Route route = take(best, "no own kernel can take the call");
    route.fallback = obstacle(Backend::kCuda, p);
    if (route.fallback == nullptr) route.fallback = kTooManyTiles;
    return route;
  }
  if (best.kernel != Backend::kTorch) return take(best, p.backend == Backend::kCuda ? kernel_reason(best.kernel) : "asked for");
  const char* why = obstacle(p.backend, p);
  if (why == nullptr) why = kTooManyTiles;
  return refuse(p, p.backend, why, p.backend == Backend::kCuda ? Backend::kTorch : cheapest(Backend::kCuda, p).kernel);
}

}  // namespace dandan_w4a16
