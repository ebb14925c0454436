// Which kernel and configuration a call takes: a pure function of architecture, dtype, shape and options. No torch, no CUDA; runs without a GPU.
//
// Order of `auto`: a profile row; an own kernel where the architecture was measured; torch otherwise. `cuda` is the first own kernel that can run, a
// kernel's name that one. What a kernel cannot read in place is copied for it; `auto` takes torch where sm80_mma would need copies of q, k or v.
// A configuration follows from head_dim, mask, architecture and the lengths of dense calls, never from the number of sequences or heads; packed calls of
// sm90a_wgmma have one for each head_dim and mask, and the tiles of keys of sm80_mma's are alike: a row's bits do not depend on what is computed beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "attention.h"
#include "configs.h"

namespace dandan_attention {

// The numbers are those of the `backend` argument of the operators.
enum class Backend : int { kAuto = 0, kTorch = 1, kCuda = 2, kSm80Mma = 3, kSm90aWgmma = 4 };
inline constexpr const char* kBackendNames[] = {"auto", "torch", "cuda", "sm80_mma", "sm90a_wgmma"};
inline constexpr int kBackendCount = 5;
inline constexpr int kFirstKernel = 3;
inline constexpr const char* backend_name(Backend b) { return kBackendNames[static_cast<int>(b)]; }

inline constexpr int kMeasuredArchitectures[] = {90};

// Own kernels, the better one first.
inline constexpr Backend kOwnKernels[] = {Backend::kSm90aWgmma, Backend::kSm80Mma};

// ---------------------------------------------------------------- configurations

// What selection knows of a configuration. Its number, Launch::config, is its place in the kernel's array in configs.h.
struct Config {
  const char* name = "";
  int head_dim = 0, tile_m = 0, tile_n = 0;
  int shared_bytes = 0;                          // 0: the kernel's architecture has enough
  bool takes_all = true, takes_masks = true;     // calls that mask by length alone; causal, window, softcap
};

inline int config_count(Backend kernel) {
  return kernel == Backend::kSm80Mma ? kSm80MmaShapeCount : kernel == Backend::kSm90aWgmma ? kSm90aWgmmaShapeCount : 0;
}

inline Config config_at(Backend kernel, int number) {
  if (kernel == Backend::kSm80Mma) {
    const MmaShape& s = kSm80MmaShapes[number];
    return {s.name, s.head_dim, s.tile_m, s.tile_n, s.shared_bytes, true, true};
  }
  const WgmmaShape& s = kSm90aWgmmaShapes[number];
  return {s.name, s.head_dim, s.tile_m, s.tile_n, 0, s.takes_all, s.takes_masks};
}

// Number of the configuration of that head_dim and name, or -1.
inline int config_number(Backend kernel, int64_t head_dim, const std::string& name) {
  for (int i = 0; i < config_count(kernel); ++i) {
    const Config config = config_at(kernel, i);
    if (config.head_dim == head_dim && name == config.name) return i;
  }
  return -1;
}

// Shared memory that a block can have.
inline constexpr int block_shared_bytes(int arch) {
  if (arch == 80 || arch == 87) return 163 * 1024;
  if (arch == 90 || arch / 10 == 10) return 227 * 1024;
  return kSmallSharedBytes;
}

// ---------------------------------------------------------------- a problem

// A row of a route table: a kernel, and its configuration where the row names one.
struct Choice {
  Backend kernel = Backend::kAuto;  // kAuto: there is no row
  int config = -1;
};

struct Problem {
  const char* op = "";    // as messages name it
  int arch = 0;           // of the device
  int code_arch = 0;      // of the code in this library that the device runs; 0: none
  bool own_code = false;  // this library has machine code with the instructions of this architecture alone (90a)
  DType dtype = DType::kHalf;
  int64_t batch = 0, seqlen_q = 0, seqlen_k = 0;  // packed: the longest
  int64_t rows_q = 0, rows_k = 0;                 // of the tensors: of a sequence, or packed of all
  int64_t num_heads_q = 0, num_heads_kv = 0, head_dim = 0;
  bool packed = false;
  bool masks = false;     // causal, window or softcap
  bool aligned = true;    // sm80_mma reads q, k and v where they are
  Backend backend = Backend::kAuto;
  Choice profile;
};

struct Route {
  Backend kernel = Backend::kTorch;
  int config = 0;
  const char* reason = "";
  std::string fallback;       // why not an own kernel, when auto takes torch
  bool profile = false;
  std::string error;          // not empty: an explicit choice that cannot run, and what would
};

inline bool takes_head_dim(Backend kernel, int64_t head_dim) {
  for (int i = 0; i < config_count(kernel); ++i) {
    if (config_at(kernel, i).head_dim == head_dim) return true;
  }
  return false;
}

// Why `kernel` cannot take the call, or nothing.
inline std::string obstacle(Backend kernel, const Problem& p) {
  if (!takes_head_dim(kernel, p.head_dim)) return "head_dim is " + std::to_string(p.head_dim) + ", the own kernels take 64, 128 and 256";
  if (p.code_arch == 0) return "this build has no code for the device's architecture";
  if (p.code_arch < 80) return "it needs sm_80 or later";
  if (kernel == Backend::kSm90aWgmma && !p.own_code) return "wgmma needs a device of sm_90 and a build with code for sm_90a";
  constexpr int64_t kMost = 0x7fffffff;
  if (std::max({p.batch, p.seqlen_q, p.seqlen_k, p.rows_q, p.rows_k, p.num_heads_q}) > kMost) return "a dimension does not fit 32 bits";
  constexpr double kTiles = 2147418112.0;  // numbers of tiles are 32 bits wide, and a persistent kernel counts a little beyond the last one
  const double tiles = static_cast<double>(p.batch) * static_cast<double>(p.num_heads_q) * static_cast<double>(p.seqlen_q / 64 + 1);
  if (tiles > kTiles) return "there are more than 2^31 tiles of queries";
  return "";
}

// Why a configuration of a kernel that can take the call cannot, or nullptr.
inline const char* config_obstacle(const Config& config, const Problem& p) {
  if (config.head_dim != p.head_dim) return "the configuration is for another head_dim";
  if (p.masks && !config.takes_masks) return "the configuration takes no mask and no softcap";
  if (!p.masks && !config.takes_all) return "the configuration is for masks and softcap";
  if (config.shared_bytes > block_shared_bytes(p.arch)) return "the configuration needs more shared memory than a block can have";
  return nullptr;
}

struct Candidate {
  Backend kernel = Backend::kTorch;
  int config = 0;
};

// Every configuration that can run, of one kernel, or of all for kCuda and kAuto; the preferred kernel first.
inline std::vector<Candidate> candidates(Backend asked, const Problem& p) {
  std::vector<Candidate> found;
  for (const Backend kernel : kOwnKernels) {
    if (static_cast<int>(asked) >= kFirstKernel && kernel != asked) continue;
    if (!obstacle(kernel, p).empty()) continue;
    for (int i = 0; i < config_count(kernel); ++i) {
      if (config_obstacle(config_at(kernel, i), p) == nullptr) found.push_back({kernel, i});
    }
  }
  return found;
}

// ---------------------------------------------------------------- the choice

// sm80_mma, by name. Not measured yet: what registers, shared memory and the bytes that a tile of queries reads from L2 let expect.
inline const char* sm80_mma_name(const Problem& p) {
  const bool few = p.seqlen_q <= 64, small_shared = block_shared_bytes(p.arch) < 163 * 1024;
  switch (p.head_dim) {
    case 64: return few ? "64x64w4s4" : "128x64w4s4";
    case 128: return few || small_shared ? "64x64w4s2" : "128x64w4s3";
    default: return "64x64w4s2";
  }
}

// sm90a_wgmma, likewise; what was fastest on an H200 (2026-12, bf16, lengths of queries and keys alike). The longest sequence of a packed call is that of
// the batch, which no row's bits shall depend on.
inline const char* sm90a_wgmma_name(const Problem& p) {
  const bool small = !p.packed && std::max(p.seqlen_q, p.seqlen_k) <= 1024, large = !p.packed && p.seqlen_k >= 2048;
  switch (p.head_dim) {
    case 64: return p.masks && small ? "128x192s6q2" : "192x128s8q2";
    case 128: return !p.masks && large ? "128x160s4q2" : "128x128s4q2";
    default: return p.masks ? "128x80s4q1" : "128x64s5q1";
  }
}

// The configuration that `kernel`, which can take the call, runs it with.
inline int best_config(Backend kernel, const Problem& p) {
  const int named = config_number(kernel, p.head_dim, kernel == Backend::kSm80Mma ? sm80_mma_name(p) : sm90a_wgmma_name(p));
  if (named >= 0 && config_obstacle(config_at(kernel, named), p) == nullptr) return named;
  for (int i = 0; i < config_count(kernel); ++i) {
    if (config_obstacle(config_at(kernel, i), p) == nullptr) return i;
  }
  return -1;
}

inline const char* kernel_reason(Backend kernel) {
  return kernel == Backend::kSm90aWgmma ? "the fastest on this architecture: TMA and wgmma" : "the fastest that can run here: mma.sync";
}

// Whether a profile row can be followed.
inline bool usable(const Choice& choice, const Problem& p) {
  if (choice.kernel == Backend::kTorch) return true;
  if (choice.kernel == Backend::kAuto || !obstacle(choice.kernel, p).empty()) return false;
  return choice.config < 0 || config_obstacle(config_at(choice.kernel, choice.config), p) == nullptr;
}

inline Route take(Backend kernel, int config, const char* reason) {
  Route route;
  route.kernel = kernel;
  route.config = config;
  route.reason = reason;
  return route;
}

inline Route take_torch(const char* reason, const std::string& fallback) {
  Route route = take(Backend::kTorch, 0, reason);
  route.fallback = fallback;
  return route;
}

// The first own kernel that can run, or kTorch.
inline Backend first_kernel(const Problem& p) {
  for (const Backend kernel : kOwnKernels) {
    if (obstacle(kernel, p).empty()) return kernel;
  }
  return Backend::kTorch;
}

inline Route refuse(const Problem& p, const std::string& why) {
  Route route;
  route.error = std::string(p.op) + ": backend \"" + backend_name(p.backend) + "\" cannot run: " + why + "; \"auto\" and \"torch\" can";
  const Backend instead = first_kernel(p);
  if (instead != Backend::kTorch) route.error += std::string(", and so can \"") + backend_name(instead) + "\"";
  return route;
}

inline Route select(const Problem& p) {
  if (p.backend == Backend::kTorch) return take(Backend::kTorch, 0, "asked for");
  if (p.backend != Backend::kAuto && p.backend != Backend::kCuda) {
    const std::string why = obstacle(p.backend, p);
    return why.empty() ? take(p.backend, best_config(p.backend, p), "asked for") : refuse(p, why);
  }
  if (p.backend == Backend::kAuto && usable(p.profile, p)) {
    int config = p.profile.config;
    if (config < 0) config = p.profile.kernel == Backend::kTorch ? 0 : best_config(p.profile.kernel, p);
    Route route = take(p.profile.kernel, config, "a profile row names it");
    route.profile = true;
    return route;
  }
  const Backend kernel = first_kernel(p);
  if (kernel == Backend::kTorch) {
    const std::string why = obstacle(Backend::kSm80Mma, p);
    return p.backend == Backend::kCuda ? refuse(p, why) : take_torch("no own kernel can take the call", why);
  }
  const bool measured = std::find(std::begin(kMeasuredArchitectures), std::end(kMeasuredArchitectures), p.arch) != std::end(kMeasuredArchitectures);
  if (p.backend == Backend::kAuto && !measured) {
    return take_torch("the kernels were never measured on this architecture",
                      "architecture never measured; name backend=\"cuda\" to take the own kernel");
  }
  if (p.backend == Backend::kAuto && kernel == Backend::kSm80Mma && !p.aligned) {
    return take_torch("sm80_mma would copy q, k or v", "sm80_mma would copy q, k or v; name backend=\"cuda\" to take it all the same");
  }
  return take(kernel, best_config(kernel, p), kernel_reason(kernel));
}

}  // namespace dandan_attention
