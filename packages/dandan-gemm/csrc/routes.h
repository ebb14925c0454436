// Which kernel and tile a call takes: a pure function of architecture, dtype, shape and layout. No torch, no CUDA; runs without a GPU.
//
// Every kernel has a table of named configurations, in configs.h. for_each_candidate() walks kernel, configuration and slices of K, cost_us() estimates the time of each
// on the GPU, and the cheapest wins. Order of `auto`: a profile row; the estimates, torch's own among them, where the architecture was measured; torch
// otherwise. `cuda` is the cheapest own candidate, a kernel's name the cheapest of that kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "configs.h"
#include "gemm.h"

namespace dandan_gemm {

// The numbers are those of the `backend` argument of the operator.
enum class Backend : int { kAuto = 0, kTorch = 1, kCuda = 2, kSm80Mma = 3, kSm90TmaMma = 4, kSm90aWgmma = 5, kSkinny = 6 };
inline constexpr const char* kBackendNames[] = {"auto", "torch", "cuda", "sm80_mma", "sm90_tma_mma", "sm90a_wgmma", "skinny"};
inline constexpr int kBackendCount = 7;
inline constexpr int kFirstKernel = 3;
inline constexpr const char* backend_name(Backend b) { return kBackendNames[static_cast<int>(b)]; }

inline constexpr int kMeasuredArchitectures[] = {90};

// ---------------------------------------------------------------- configurations

// One way of a kernel to cut the problem, as the cost model sees it. Its number, Tile::config, is its place in the kernel's table in configs.h.
struct Config {
  const char* name = "";
  int tile_m = 0, tile_n = 0, tile_k = 0;  // of out's rows, out's columns and K that a block has at a time
  uint64_t splits = 2;                     // bit s: K may be cut into s slices for different blocks
  bool rows_along_k = true;                // takes a b whose rows are along K
  int blocks = 1;                          // resident on a multiprocessor at a time
  double efficiency = 0;                   // mma.sync: share of the tensor rate that the main loop keeps when nothing else is short
  double bandwidth = 0;                    // mma.sync, skinny: share of the memory rate, likewise
  int stages = 0;                          // wgmma: slices of K in shared memory
  bool persistent = false, swap = false;   // wgmma: see WgmmaShape
  double ramp = 0;                         // skinny: us beside the bytes
  double rows = 0;                         // skinny: us for a megabyte of a, which every block reads through L2
  double tail = 0;                         // skinny: share of the last wave's missing blocks that is lost
};

inline constexpr int kSplits[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32};  // that are tried
inline constexpr uint64_t any_split() {
  uint64_t bits = 0;
  for (const int s : kSplits) bits |= uint64_t{1} << s;
  return bits;
}

inline constexpr bool takes_split(const Config& config, int64_t split) { return split >= 1 && split < 64 && (config.splits >> split & 1) != 0; }
inline constexpr int max_split(const Config& config) {
  int most = 1;
  for (int s = 1; s < 64; ++s) most = takes_split(config, s) ? s : most;
  return most;
}

// Blocks that share a multiprocessor of an H200: by shared memory, and by registers where a thread has so many.
inline constexpr int resident(int shared_bytes, int threads, int registers) {
  const int by_memory = 227 * 1024 / (shared_bytes + 1024), by_registers = 65536 / (threads * registers);
  const int blocks = by_memory < by_registers ? by_memory : by_registers;
  return blocks < 1 ? 1 : blocks;
}

// What the cost model knows of a configuration; measured on an H200 (2026-12), in the order of the shapes of configs.h.
struct MmaCost {
  double efficiency, bandwidth;
};
inline constexpr MmaCost kSm80MmaCosts[] = {{0.42, 0.64}, {0.43, 0.64}, {0.27, 0.45}, {0.35, 0.57}, {0.33, 0.82}, {0.27, 0.79}, {0.25, 0.86}, {0.17, 0.93}, {0.09, 0.92}};
inline constexpr MmaCost kSm90TmaMmaCosts[] = {{0.47, 0.65}, {0.49, 0.52}, {0.43, 0.49}, {0.41, 0.41}, {0.41, 0.76}, {0.32, 0.64}, {0.18, 0.86}};

struct SkinnyCost {
  double ramp, bandwidth, rows, tail;
};
inline constexpr SkinnyCost kSkinnyCosts[] = {{2.91, 1.03, 0.059, 0.36}, {2.92, 0.96, 0.015, 0.35}, {2.84, 0.98, 0.025, 0.40}, {2.73, 0.92, 0.016, 0.20},
                                              {2.87, 0.97, 0.046, 0.40}, {3.10, 0.85, 0.045, 0.58}, {2.74, 0.93, 0.010, 0.12}};

static_assert(std::size(kSm80MmaCosts) == kSm80MmaShapeCount && std::size(kSm90TmaMmaCosts) == kSm90TmaMmaShapeCount &&
              std::size(kSkinnyCosts) == kSkinnyShapeCount);

inline constexpr Config mma_config(const MmaShape& s, const MmaCost& cost) {
  Config c;
  c.name = s.name;
  c.tile_m = s.tile_m, c.tile_n = s.tile_n, c.tile_k = s.tile_k;
  c.splits = any_split();
  c.blocks = resident(s.shared_bytes, s.threads, s.warp_m * s.warp_n / 32 + 80);  // the sums, and what the loop needs
  c.efficiency = cost.efficiency;
  c.bandwidth = cost.bandwidth;
  return c;
}

inline constexpr Config wgmma_config(const WgmmaShape& s) {
  const int rows = s.swap ? s.tile_n : s.tile_m, columns = s.swap ? s.tile_m : s.tile_n;  // of the instruction
  Config c;
  c.name = s.name;
  c.tile_m = s.tile_m, c.tile_n = s.tile_n, c.tile_k = 64;
  c.splits = s.splits;
  c.rows_along_k = s.takes_kn();
  c.blocks = s.persistent ? 1 : resident(s.stages * (s.tile_m + s.tile_n) * 128, rows / (64 * s.blocks_x) * 128 + 32, columns * s.blocks_x / 2 + 60);
  c.stages = s.stages;
  c.persistent = s.persistent;
  c.swap = s.swap;
  return c;
}

inline constexpr Config skinny_config(const SkinnyShape& s, const SkinnyCost& cost) {
  Config c;
  c.name = s.name;
  c.tile_m = kMaxSkinnyRows, c.tile_n = 8 * s.groups, c.tile_k = 32 * s.chunks;
  for (int split = 2; split <= kMaxSkinnySplit; ++split) c.splits |= uint64_t{1} << split;
  c.rows_along_k = false;
  c.blocks = std::min(2048 / (32 * s.warps), resident(0, 32 * s.warps, s.registers));
  c.ramp = cost.ramp;
  c.bandwidth = cost.bandwidth;
  c.rows = cost.rows;
  c.tail = cost.tail;
  return c;
}

template <int kCount>
struct Configs {
  Config configs[kCount];
};

template <typename Shape, typename Cost, int kCount>
inline constexpr Configs<kCount> make_table(const Shape (&shapes)[kCount], const Cost (&costs)[kCount], Config (*config)(const Shape&, const Cost&)) {
  Configs<kCount> table;
  for (int i = 0; i < kCount; ++i) table.configs[i] = config(shapes[i], costs[i]);
  return table;
}

template <typename Shape, int kCount>
inline constexpr Configs<kCount> make_table(const Shape (&shapes)[kCount], Config (*config)(const Shape&)) {
  Configs<kCount> table;
  for (int i = 0; i < kCount; ++i) table.configs[i] = config(shapes[i]);
  return table;
}

inline constexpr auto kSm80MmaTable = make_table(kSm80MmaShapes, kSm80MmaCosts, mma_config);
inline constexpr auto kSm90TmaMmaTable = make_table(kSm90TmaMmaShapes, kSm90TmaMmaCosts, mma_config);
inline constexpr auto kSm90aWgmmaTable = make_table(kSm90aWgmmaShapes, wgmma_config);
inline constexpr auto kSkinnyTable = make_table(kSkinnyShapes, kSkinnyCosts, skinny_config);

struct ConfigTable {
  const Config* configs;
  int count;
};

inline constexpr ConfigTable configs_of(Backend kernel) {
  switch (kernel) {
    case Backend::kSm80Mma: return {kSm80MmaTable.configs, static_cast<int>(std::size(kSm80MmaTable.configs))};
    case Backend::kSm90TmaMma: return {kSm90TmaMmaTable.configs, static_cast<int>(std::size(kSm90TmaMmaTable.configs))};
    case Backend::kSm90aWgmma: return {kSm90aWgmmaTable.configs, static_cast<int>(std::size(kSm90aWgmmaTable.configs))};
    case Backend::kSkinny: return {kSkinnyTable.configs, static_cast<int>(std::size(kSkinnyTable.configs))};
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
  int arch = 0;            // of the device
  int code_arch = 0;       // of the code in this library that the device runs; 0: none
  bool own_code = false;   // this library has machine code with the instructions of this architecture alone (90a)
  int sm_count = 0;
  DType dtype = DType::kHalf;
  int64_t m = 0, n = 0, k = 0;
  bool weight_transposed = false;  // as the kernel reads b: rows along N
  bool a_aligned = false, b_aligned = false, out_aligned = false;  // rows start at multiples of 16 bytes and do not overlap
  int64_t copied = 0;      // elements of a, b and out that are copied around the kernel
  int copies = 0;          // and how many tensors they are of
  Backend backend = Backend::kAuto;
  Choice forced;           // for tests and measurements: this and nothing else
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

// Why `kernel` cannot take the call, or nullptr.
inline const char* obstacle(Backend kernel, const Problem& p) {
  if (p.code_arch == 0) return "this build has no code for the device's architecture";
  if (p.code_arch < 80) return "it needs sm_80 or later";
  if (kernel == Backend::kSm80Mma) return nullptr;
  if (kernel == Backend::kSm90TmaMma && p.code_arch < 90) return "TMA needs sm_90 or later";
  if (kernel == Backend::kSm90aWgmma && !p.own_code) return "wgmma needs a device of sm_90 and a build with code for sm_90a";
  if (kernel == Backend::kSkinny) {
    static_assert(kMaxSkinnyRows == 16);
    if (p.m > kMaxSkinnyRows) return "a has more than 16 rows";
    if (!p.weight_transposed) return "rows of b are along K";
  }
  if (!p.a_aligned) return "rows of a do not start at multiples of 16 bytes";
  if (!p.b_aligned) return "rows of b do not start at multiples of 16 bytes";
  if (kernel == Backend::kSkinny && p.k % 8 != 0) return "K is no multiple of 8";
  if (std::max({p.m, p.n, p.k}) > 0x7fffffff) return "a dimension does not fit 32-bit coordinates";
  return nullptr;
}

// Tiles of the result; a double, since sizes are checked with it.
inline double tiles_of(const Config& config, const Problem& p) {
  return static_cast<double>(ceil_div(p.m, config.tile_m)) * static_cast<double>(ceil_div(p.n, config.tile_n));
}

// Why a configuration of a kernel that can take the call cannot, or nullptr.
inline const char* config_obstacle(const Config& config, const Problem& p) {
  if (!config.rows_along_k && !p.weight_transposed) return "the configuration reads no b whose rows are along K";
  if (tiles_of(config, p) > 0x7fffffff) return "there are too many tiles for one grid";
  return nullptr;
}

// Why K cannot be cut into so many slices, or nullptr.
inline const char* split_obstacle(Backend kernel, const Config& config, int split, const Problem& p) {
  if (!takes_split(config, split)) return "the configuration does not take that many slices";
  if (split > 1 && split > ceil_div(p.k, config.tile_k)) return "K has fewer tiles than that many slices";
  if (split > 1 && kernel == Backend::kSkinny && p.code_arch < 90) return "slices need clusters, from sm_90";
  return nullptr;
}

// Memory that a launch needs beside its operands: the FP32 sums of each slice. The other kernels add slices inside a cluster.
inline size_t workspace_bytes(Backend kernel, const Tile& tile, const Problem& p) {
  if ((kernel != Backend::kSm80Mma && kernel != Backend::kSm90TmaMma) || tile.split <= 1) return 0;
  return sizeof(float) * static_cast<size_t>(tile.split) * static_cast<size_t>(p.m) * static_cast<size_t>(p.n);
}

// ---------------------------------------------------------------- the cost model

// Microseconds, bytes and FLOPs of an H200 (132 multiprocessors). The forms are physics, the numbers fitted to the record of the calibration there (2026-12:
// some 4,500 timings on 38 layers of models, 1 to 4096 rows): the configuration that the estimates pick is 2% behind the fastest on average.

// Bytes of a, b and out, once each.
inline double operand_bytes(const Problem& p) {
  return kElementSize * (static_cast<double>(p.m) * static_cast<double>(p.k) + static_cast<double>(p.n) * static_cast<double>(p.k) +
                         static_cast<double>(p.m) * static_cast<double>(p.n));
}

inline double waves_of(double blocks, double slots) { return blocks <= slots ? 1.0 : std::ceil(blocks / slots); }

// Few blocks have too few bytes on their way to fill the memory's time.
inline double few_blocks(double blocks, double enough) { return blocks >= enough ? 1.0 : std::sqrt(std::max(blocks, 1.0) / enough); }

// mma.sync: the main loop at its share of the tensor rate, the bytes, the bytes between L2 and the multiprocessors. What a launch costs beside those was the
// same with and without a second kernel for slices of K.
inline double mma_us(const Config& config, int split, const Problem& p) {
  constexpr double kDramBytes = 4.58e6, kL2Bytes = 7.0e6, kFlopsPerSm = 989.0e6 / 132, kLaunch = 5.0, kTile = 0.6;
  const double tiles = tiles_of(config, p), blocks = tiles * split;
  const double waves = waves_of(blocks, static_cast<double>(p.sm_count) * config.blocks);
  const double sharing = std::max(1.0, std::min<double>(config.blocks, blocks / p.sm_count));  // blocks of a multiprocessor
  const double steps = static_cast<double>(ceil_div(ceil_div(p.k, config.tile_k), split));
  const double step = 2.0 * config.tile_m * config.tile_n * config.tile_k * sharing / (kFlopsPerSm * config.efficiency);
  const double compute = waves * (steps * step + kTile);
  const double share = std::min(1.0, blocks / 128.0);
  const double sums = split > 1 ? 2.0 * sizeof(float) * split * static_cast<double>(p.m) * static_cast<double>(p.n) : 0.0;
  const double memory = operand_bytes(p) / (kDramBytes * config.bandwidth * share) + sums / kL2Bytes;
  const double cache = kElementSize * tiles * (config.tile_m + config.tile_n) * static_cast<double>(p.k) / (kL2Bytes * share);
  return kLaunch + std::max({compute, memory, cache});
}

// sm90a_wgmma: a slice of 64 k costs a multiprocessor its multiplications or the way of its bytes into shared memory (64 a clock), or, with few stages,
// the time that its bytes take to come.
inline double wgmma_us(const Config& config, int split, const Problem& p) {
  constexpr double kClock = 1700.0, kLatency = 0.64, kDramBytes = 4.14e6, kLaunch = 0.6, kMemoryRamp = 2.3;
  const double blocks = tiles_of(config, p) * split;
  // Clusters do not fill every multiprocessor: 30 of four, some 38 of three blocks that need one each.
  const double usable = p.sm_count * (split >= 4 ? 120.0 / 132 : split == 3 ? 114.0 / 132 : 1.0);
  const double waves = waves_of(blocks, usable * config.blocks);
  const double busiest = waves <= 1.0 ? std::ceil(blocks / p.sm_count) : config.blocks > 1 ? blocks / p.sm_count + 0.5 * config.blocks : waves;
  const double steps = static_cast<double>(ceil_div(ceil_div(p.k, config.tile_k), split));
  const double share = config.tile_m * config.tile_n >= 128 * 192 && config.tile_n % 64 == 0 ? 0.86 : 0.80;  // of the tensor rate
  const double clocks = std::max(config.tile_m * config.tile_n / 32.0 / share, (config.tile_m + config.tile_n) * 2.0);
  const double tile = (config.persistent ? 0.1 : 2.3) + 1.2 * config.tile_m * config.tile_n / 16384.0;
  const double stream = std::max(busiest * steps * clocks / kClock, waves * steps * kLatency / (config.stages - 1)) + waves * tile;
  // A weight that is read by several rows of tiles comes from L2 for most of them, not for all.
  const double again = config.swap && p.m > config.tile_m ? 1.05 : 1.0;
  const double enough = 120.0 * std::max(0.0, 1.0 - config.stages / steps);  // fewer blocks do where all that they read is on its way at once
  const double memory = kMemoryRamp + again * operand_bytes(p) / (kDramBytes * few_blocks(blocks, enough));
  // Rows of a that are not there are filled in, which costs the copy engine more than reading them.
  const double missing = static_cast<double>(std::max<int64_t>(config.tile_m - p.m, 0)) / (config.tile_m + config.tile_n);
  const double padding = config.swap ? 1.0 + 0.5 * missing : 2 * p.m <= config.tile_m ? 1.6 : 1.0;
  return kLaunch + padding * std::max(stream, memory) + (split > 1 ? 0.47 : 0.0) + (split > 2 ? 0.1 : 0.0);
}

// skinny: the bytes, and a once for every block through L2.
inline double skinny_us(const Config& config, int split, const Problem& p) {
  constexpr double kDramBytes = 4.4e6, kCluster = 0.6;
  const double tiles = static_cast<double>(ceil_div(p.n, config.tile_n)), blocks = tiles * split;
  const double waves = blocks / (static_cast<double>(p.sm_count) * config.blocks);
  const double memory = operand_bytes(p) / (kDramBytes * config.bandwidth * few_blocks(blocks, 100.0));
  const double rows = config.rows * kElementSize * tiles * static_cast<double>(p.m) * static_cast<double>(p.k) / 1e6;
  const double tail = config.tail * (std::ceil(waves) - waves) / std::max(waves, 1.0) * memory;
  return config.ramp + memory + rows + tail + (split > 1 ? kCluster : 0.0);
}

inline double cost_us(Backend kernel, const Config& config, int split, const Problem& p) {
  // Copies around the kernel: a launch each, read and written.
  const double copies = 1.6 * p.copies + 2.0 * kElementSize * static_cast<double>(p.copied) / 4.58e6;
  return copies + (kernel == Backend::kSkinny        ? skinny_us(config, split, p)
                   : kernel == Backend::kSm90aWgmma ? wgmma_us(config, split, p)
                                                    : mma_us(config, split, p));
}

// torch's time: F.linear on an H200 (torch 2.11.0, CUDA 13.0, 2026-12) is rarely below this. Small layers take as long as K is.
inline double torch_us(const Problem& p) {
  const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  return 3.3 + std::max({operand_bytes(p) / 4.0e6, flops / (0.72 * 989.0e6 * p.sm_count / 132), 1.3e-3 * static_cast<double>(p.k)});
}
// What torch has to be estimated below, so that auto takes it: its estimate is the least sure one.
inline constexpr double kTorchMargin = 0.9;

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
    if (config_obstacle(config, p) != nullptr) continue;
    for (const int split : kSplits) {
      if (split_obstacle(kernel, config, split, p) == nullptr) f(Candidate{kernel, i, split, cost_us(kernel, config, split, p)});
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
    case Backend::kSm80Mma: return "estimated to be the fastest: any layout, mma.sync";
    case Backend::kSm90TmaMma: return "estimated to be the fastest: TMA and mma.sync";
    case Backend::kSm90aWgmma: return "estimated to be the fastest: TMA and wgmma";
    case Backend::kSkinny: return "estimated to be the fastest: few rows, bound by the bytes of b";
    default: return "";
  }
}

// Whether a profile row can be followed.
inline bool usable(const Choice& choice, const Problem& p) {
  if (choice.kernel == Backend::kTorch) return true;
  if (choice.kernel == Backend::kAuto || obstacle(choice.kernel, p) != nullptr) return false;
  if (choice.config < 0) return cheapest(choice.kernel, p).kernel == choice.kernel;
  const Config& config = configs_of(choice.kernel).configs[choice.config];
  return config_obstacle(config, p) == nullptr && split_obstacle(choice.kernel, config, choice.split, p) == nullptr;
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

inline Route refuse(Backend asked, const char* why, Backend instead) {
  Route route;
  route.error = std::string("gemm: backend \"") + backend_name(asked) + "\" cannot run: " + why + "; \"auto\" and \"torch\" can";
  if (instead != Backend::kTorch) route.error += std::string(", and so can \"") + backend_name(instead) + "\"";
  return route;
}

inline Route select(const Problem& p) {
  if (p.forced.kernel != Backend::kAuto) {
    const Config& config = configs_of(p.forced.kernel).configs[p.forced.config];
    const char* why = obstacle(p.forced.kernel, p);
    if (why == nullptr) why = config_obstacle(config, p);
    if (why == nullptr) why = split_obstacle(p.forced.kernel, config, p.forced.split, p);
    if (why != nullptr) return refuse(p.forced.kernel, why, Backend::kTorch);
    return take(p.forced, p, "asked for");
  }
  if (p.backend == Backend::kTorch) return take(Choice{Backend::kTorch}, p, "asked for");
  if (p.backend == Backend::kAuto) {
    if (usable(p.profile, p)) {
      Route route = take(p.profile, p, "a profile row names it");
      route.profile = true;
      return route;
    }
    const bool measured = std::find(std::begin(kMeasuredArchitectures), std::end(kMeasuredArchitectures), p.arch) != std::end(kMeasuredArchitectures);
    const Candidate best = cheapest(Backend::kCuda, p);
    if (best.kernel == Backend::kTorch) {
      Route route = take(best, "no own kernel can take the call");
      route.fallback = obstacle(Backend::kSm80Mma, p);
      if (route.fallback == nullptr) route.fallback = "there are too many tiles for one grid";
      return route;
    }
    if (!measured) {
      Route route = take(Choice{Backend::kTorch}, p, "the kernels were never measured on this architecture");
      route.fallback = "architecture never measured; name backend=\"cuda\" to take the own kernel";
      return route;
    }
    if (torch_us(p) < kTorchMargin * best.us) {
      Route route = take(Candidate{Backend::kTorch, 0, 1, torch_us(p)}, "torch is estimated to be faster");
      route.fallback = "torch is estimated to be faster; name backend=\"cuda\" to take the own kernel";
      return route;
    }
    return take(best, kernel_reason(best.kernel));
  }
  const Candidate best = cheapest(p.backend, p);
  if (best.kernel != Backend::kTorch) return take(best, p.backend == Backend::kCuda ? kernel_reason(best.kernel) : "asked for");
  const Backend judged = p.backend == Backend::kCuda ? Backend::kSm80Mma : p.backend;
  const char* why = obstacle(judged, p);
  if (why == nullptr) why = "there are too many tiles for one grid";
  return refuse(p.backend, why, p.backend == Backend::kCuda ? Backend::kTorch : cheapest(Backend::kCuda, p).kernel);
}

}  // namespace dandan_gemm
