// Which kernel and tile a call takes: a pure function of architecture, dtype, shape and layout. No torch, no CUDA; runs without a GPU.
//
// Every kernel has a table of named configurations, in configs.h. for_each_candidate() walks kernel, configuration and slices of K, cost_us() estimates the
// time of each on the GPU, and the cheapest wins. Order of `auto`: a profile row; the cheapest own candidate, where the architecture was measured; torch
// otherwise. `cuda` is the cheapest own candidate, a kernel's name the cheapest of that kernel.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>

#include "configs.h"
#include "w4a16.h"

namespace dandan_w4a16 {

// The numbers are those of the `backend` argument of the operators.
enum class Backend : int { kAuto = 0, kTorch = 1, kCuda = 2, kSm80Decode = 3, kSm90aWgmma = 4 };
inline constexpr const char* kBackendNames[] = {"auto", "torch", "cuda", "sm80_decode", "sm90a_wgmma"};
inline constexpr int kBackendCount = 5;
inline constexpr int kFirstKernel = 3;
inline constexpr const char* backend_name(Backend b) { return kBackendNames[static_cast<int>(b)]; }

inline constexpr std::array<int, 0> kMeasuredArchitectures = {};

// ---------------------------------------------------------------- configurations

// One way of a kernel to cut the problem, as the cost model sees it. Its number, Tile::config, is its place in the kernel's table in configs.h.
struct Config {
  const char* name = "";
  int tile_m = 0, tile_n = 0, tile_k = kBlock;  // of x's rows, out's columns and K that a block has at a time
  unsigned splits = 0b10;                       // bit s: K may be cut into s slices for different blocks
  int blocks = 1;                               // resident on a multiprocessor at a time
  int blocks_few_rows = 1;                      // decode: the same with up to 8 rows
  int warps = 0, depth = 0;                     // decode: see DecodeShape
  int consumers = 0, stages = 0;                // wgmma: see WgmmaShape
};

inline constexpr int kMaxSplit = 4;
inline constexpr bool takes_split(const Config& config, int64_t split) { return split >= 1 && split <= kMaxSplit && (config.splits >> split & 1) != 0; }
inline constexpr int max_split(const Config& config) {
  int most = 1;
  for (int s = 1; s <= kMaxSplit; ++s) most = takes_split(config, s) ? s : most;
  return most;
}

// Blocks that share a multiprocessor of an H200: by shared memory, by registers and by threads.
inline constexpr int resident(int shared_bytes, int threads, int registers) {
  const int blocks = std::min({227 * 1024 / (shared_bytes + 1024), 65536 / (threads * registers), 2048 / threads});
  return blocks < 1 ? 1 : blocks;
}

inline constexpr int decode_blocks(const DecodeShape& s, int halves) {
  const int kept = s.depth * s.tiles * 6 + s.tiles * halves * 4 + 8 * halves;  // codes and scales in flight, sums, rows of x
  const int rings = s.warps * s.depth * halves * 1024, sums = s.tiles * halves * 512 * (s.warps + kMaxDecodeSplit);
  return resident(std::max(rings, sums), 32 * s.warps, std::min(255, kept * 18 / 10 + 8));
}

inline constexpr Config decode_config(const DecodeShape& s) {
  Config c;
  c.name = s.name;
  c.tile_m = kMaxDecodeRows, c.tile_n = 16 * s.tiles;
  for (int split = 2; split <= kMaxDecodeSplit; ++split) c.splits |= 1u << split;
  c.blocks = decode_blocks(s, 2);
  c.blocks_few_rows = decode_blocks(s, 1);
  c.warps = s.warps;
  c.depth = s.depth;
  return c;
}

// Codes, scales and zero points of 64 rows by 64 k, with groups of 64 or more.
inline constexpr int kWeightBlockBytes = 2048 + 256;

inline constexpr Config wgmma_config(const WgmmaShape& s) {
  const int stage = (s.tokens * 128 + s.consumers * kWeightBlockBytes + 1023) / 1024 * 1024;
  Config c;
  c.name = s.name;
  c.tile_m = s.tokens, c.tile_n = 64 * s.consumers;
  c.splits = s.splits;
  c.blocks = resident(s.stages * stage, 128 * s.consumers + 32, s.tokens / 2 + 40);
  c.consumers = s.consumers;
  c.stages = s.stages;
  return c;
}

template <int kCount>
struct Configs {
  Config configs[kCount];
};

template <typename Shape, int kCount>
inline constexpr Configs<kCount> make_table(const Shape (&shapes)[kCount], Config (*config)(const Shape&)) {
  Configs<kCount> table;
  for (int i = 0; i < kCount; ++i) table.configs[i] = config(shapes[i]);
  return table;
}

inline constexpr auto kSm80DecodeTable = make_table(kDecodeShapes, decode_config);
inline constexpr auto kSm90aWgmmaTable = make_table(kWgmmaShapes, wgmma_config);

struct ConfigTable {
  const Config* configs;
  int count;
};

inline constexpr ConfigTable configs_of(Backend kernel) {
  switch (kernel) {
    case Backend::kSm80Decode: return {kSm80DecodeTable.configs, static_cast<int>(std::size(kSm80DecodeTable.configs))};
    case Backend::kSm90aWgmma: return {kSm90aWgmmaTable.configs, static_cast<int>(std::size(kSm90aWgmmaTable.configs))};
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
  bool scales_fit = false;      // the weight was put in order for the dtype of x
  bool bias_fits = false;       // there is none, or it has the dtype of x
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
  if (!p.scales_fit) return "the weight was finalised for another dtype than that of x";
  if (!p.bias_fits) return "bias has another dtype than x";
  if (!p.weight_in_place) return "codes or scales are not contiguous from a multiple of 16 bytes";
  if (p.m > 0x7fffffff) return "the rows of x do not fit 32-bit coordinates";
  return nullptr;
}

// Why `kernel` cannot take the call, or nullptr. Of kCuda: why none of them can.
inline const char* obstacle(Backend kernel, const Problem& p) {
  if (const char* why = common_obstacle(p)) return why;
  const bool few_rows = p.m <= kMaxDecodeRows;
  switch (kernel) {
    case Backend::kSm80Decode: return few_rows ? nullptr : "x has more than 16 rows";
    case Backend::kSm90aWgmma: return p.own_code ? nullptr : "wgmma needs a device of sm_90 and a build with code for sm_90a";
    default: return few_rows || p.own_code ? nullptr : "x has more than 16 rows, and wgmma needs a device of sm_90 and a build with code for sm_90a";
  }
}

// Tiles of the result; a double, since sizes are checked with it.
inline double tiles_of(const Config& config, const Problem& p) {
  return static_cast<double>(ceil_div(p.m, config.tile_m)) * static_cast<double>(ceil_div(p.n, config.tile_n));
}

inline constexpr const char* kTooManyTiles = "there are too many tiles for one grid";

// Why a configuration of a kernel that can take the call cannot with so many slices of K, or nullptr.
inline const char* config_obstacle(const Config& config, int split, const Problem& p) {
  if (!takes_split(config, split)) return "the configuration does not take that many slices";
  if (split > 1 && split > ceil_div(p.k, config.tile_k)) return "K has fewer blocks of 64 than that many slices";
  if (split > 1 && p.code_arch < 90) return "slices need clusters, from sm_90";
  if (tiles_of(config, p) * split > 0x7fffffff) return kTooManyTiles;
  return nullptr;
}

// ---------------------------------------------------------------- the cost model

// Microseconds, bytes and FLOPs of an H200 (132 multiprocessors). Nothing here was fitted to these kernels: forms and numbers are those of dandan-gemm's
// kernels that read the same memory in the same way, instructions were counted.

inline constexpr double kClock = 1700.0;

// Bytes of the weight, x and out, once each.
inline double operand_bytes(const Problem& p) {
  return 4.0 * static_cast<double>(code_words(p.n, p.k) + scale_words(p.n, p.k, p.group)) +
         2.0 * static_cast<double>(p.m) * (static_cast<double>(p.k) + static_cast<double>(p.n));
}

// Share of the memory's rate: too little on its way does not fill the memory's time.
inline double filled(double have, double enough) { return have >= enough ? 1.0 : std::sqrt(std::max(have, 1.0) / enough); }

// Clusters do not fill every multiprocessor: 30 of four, some 38 of three blocks that need one each.
inline double usable_multiprocessors(int split, const Problem& p) { return p.sm_count * (split >= 4 ? 120.0 / 132 : split == 3 ? 114.0 / 132 : 1.0); }

// sm80_decode: the bytes, or the instructions that make weights of codes; x once for every block through L2.
inline double decode_us(const Config& config, int split, const Problem& p) {
  constexpr double kRamp = 2.6, kDramBytes = 4.4e6, kL2Bytes = 28.0e6, kFlight = 3.3e6, kWordClocks = 20.0, kTail = 0.3, kCluster = 0.6;
  const double blocks = tiles_of(config, p) * split;
  const double slots = usable_multiprocessors(split, p) * (p.m <= 8 ? config.blocks_few_rows : config.blocks);
  const double waves = blocks / slots;
  // Bytes of codes that all blocks have on their way, 512 for 16 columns by 64 k; fewer do where that is all that they read.
  const double steps = static_cast<double>(ceil_div(ceil_div(p.k, kBlock), split)), ahead = std::min<double>(config.warps * config.depth, steps);
  const double flight = std::min(blocks, slots) * config.tile_n * ahead * 32.0;
  const double memory = operand_bytes(p) / (kDramBytes * filled(flight, kFlight * (1.0 - ahead / steps)));
  // A warp makes 8 weights a lane of a word and multiplies them; 4 warps of a multiprocessor at a time.
  const double words = static_cast<double>(code_words(p.n, p.k)) / 32.0;
  const double busy = std::min(1.0, blocks / p.sm_count);
  const double compute = words * kWordClocks * (p.m <= 8 ? 1.0 : 1.3) / (4.0 * p.sm_count * busy * kClock);
  const double rows = 2.0 * tiles_of(config, p) * static_cast<double>(p.m) * static_cast<double>(p.k) / kL2Bytes;
  const double tail = kTail * (std::ceil(waves) - waves) / std::max(waves, 1.0) * memory;
  return kRamp + std::max(memory, compute) + rows + tail + (split > 1 ? kCluster : 0.0);
}

// sm90a_wgmma: a slice of 64 k costs a multiprocessor its multiplications (64 x tokens x 64 for each warp group) and some of the making of its weights, or the
// way of its bytes into shared memory (64 a clock); or a warp group its own turn, since it makes weights while it does not multiply; or, with few stages,
// the time that its bytes take to come.
inline double wgmma_us(const Config& config, int split, const Problem& p) {
  constexpr double kLatency = 0.64, kDramBytes = 4.14e6, kLaunch = 0.6, kMemoryRamp = 2.3, kTensorShare = 0.8;
  constexpr double kDequantize = 80.0, kExposed = 0.3, kTurn = 100.0;  // clocks of a warp group's block of 64 k; the share that is not hidden; of waiting
  const double blocks = tiles_of(config, p) * split;
  const double slots = usable_multiprocessors(split, p) * config.blocks;
  const double waves = blocks <= slots ? 1.0 : std::ceil(blocks / slots);
  const double busiest = waves <= 1.0 ? std::ceil(blocks / p.sm_count) : config.blocks > 1 ? blocks / p.sm_count + 0.5 * config.blocks : waves;
  const double steps = static_cast<double>(ceil_div(ceil_div(p.k, config.tile_k), split));
  const double multiply = config.tile_m * 64 / 32.0 / kTensorShare;
  const double bytes = config.tile_m * 128.0 + config.consumers * kWeightBlockBytes;
  const double clocks = std::max(config.consumers * (multiply + kExposed * kDequantize), bytes / 64.0);
  const double turn = multiply + kDequantize + kTurn;
  const double tile = 2.3 + 1.2 * config.tile_m * config.tile_n / 16384.0;
  const double arrival = kLatency / (config.stages - 1);
  const double stream = std::max({busiest * steps * clocks / kClock, waves * steps * turn / kClock, waves * steps * arrival}) + waves * tile;
  // A weight that is read by several rows of tiles comes from L2 for most of them, not for all.
  const double again = p.m > config.tile_m ? 1.05 : 1.0;
  const double enough = 120.0 * std::max(0.0, 1.0 - config.stages / steps);  // fewer blocks do where all that they read is on its way at once
  const double memory = kMemoryRamp + again * operand_bytes(p) / (kDramBytes * filled(blocks, enough));
  // Rows of x that are not there are filled in, which costs the copy engine more than reading them.
  const double missing = static_cast<double>(std::max<int64_t>(config.tile_m - p.m, 0)) / (config.tile_m + config.tile_n);
  return kLaunch + (1.0 + 0.5 * missing) * std::max(stream, memory) + (split > 1 ? 0.47 : 0.0) + (split > 2 ? 0.1 : 0.0);
}

inline double cost_us(Backend kernel, const Config& config, int split, const Problem& p) {
  // Copies around the kernel: a launch each, read and written.
  const double copies = 1.6 * p.copies + 4.0 * static_cast<double>(p.copied) / 4.58e6;
  return copies + (kernel == Backend::kSm80Decode ? decode_us(config, split, p) : wgmma_us(config, split, p));
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
    for (int split = 1; split <= kMaxSplit; ++split) {
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
    case Backend::kSm90aWgmma: return "estimated to be the fastest: weights made in registers, wgmma";
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

inline std::string refusal(const char* op, Backend asked, const char* why, Backend instead) {
  std::string text = std::string(op) + ": backend \"" + backend_name(asked) + "\" cannot run: " + why + "; \"auto\" and \"torch\" can";
  if (instead != Backend::kTorch) text += std::string(", and so can \"") + backend_name(instead) + "\"";
  return text;
}

inline Route refuse(Backend asked, const char* why, Backend instead) {
  Route route;
  route.error = refusal("packed_linear", asked, why, instead);
  return route;
}

// packed_linear: the weight is in the order that the kernels read.
inline Route select(const Problem& p) {
  if (p.forced.kernel != Backend::kAuto) {
    const char* why = obstacle(p.forced.kernel, p);
    if (why == nullptr) why = config_obstacle(configs_of(p.forced.kernel).configs[p.forced.config], p.forced.split, p);
    if (why != nullptr) return refuse(p.forced.kernel, why, Backend::kTorch);
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
    const bool measured = std::find(kMeasuredArchitectures.begin(), kMeasuredArchitectures.end(), p.arch) != kMeasuredArchitectures.end();
    if (best.kernel != Backend::kTorch && measured) return take(best, kernel_reason(best.kernel));
    if (best.kernel != Backend::kTorch) {
      Route route = take(Choice{Backend::kTorch}, p, "the kernels were never measured on this architecture");
      route.fallback = "architecture never measured; name backend=\"cuda\" to take the own kernel";
      return route;
    }
    Route route = take(best, "no own kernel can take the call");
    route.fallback = obstacle(Backend::kCuda, p);
    if (route.fallback == nullptr) route.fallback = kTooManyTiles;
    return route;
  }
  if (best.kernel != Backend::kTorch) return take(best, p.backend == Backend::kCuda ? kernel_reason(best.kernel) : "asked for");
  const char* why = obstacle(p.backend, p);
  if (why == nullptr) why = kTooManyTiles;
  return refuse(p.backend, why, p.backend == Backend::kCuda ? Backend::kTorch : cheapest(Backend::kCuda, p).kernel);
}

// w4a16_linear: no kernel reads the canonical order.
inline constexpr const char* kNotFinalised = "the weight is not finalised";

inline Route select_canonical(Backend asked) {
  Route route;
  if (asked == Backend::kTorch) {
    route.reason = "asked for";
  } else if (asked == Backend::kAuto) {
    route.reason = "no own kernel can take the call";
    route.fallback = kNotFinalised;
  } else {
    route.error = refusal("w4a16_linear", asked, kNotFinalised, Backend::kTorch);
  }
  return route;
}

}  // namespace dandan_w4a16
