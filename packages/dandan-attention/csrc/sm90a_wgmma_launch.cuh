// What the units that hold sm90a_wgmma's instantiations share, one unit for each head_dim and element type.
#pragma once

#include <algorithm>
#include <cmath>

#include "configs.h"
#include "launch.h"
#include "sm90a_wgmma_attention.cuh"
#include "tma_launch.h"

namespace dandan_attention {

inline Transform transform_of(const Params& params) {
  constexpr double kLog2E = 1.4426950408889634;
  // tanh(u), |u| < kNear: least maximum of the error, 8.3e-7.
  constexpr double kNear = 0.38, kOdd[3] = {0.99998386, -0.33243747, 0.12064592};
  Transform t = {};
  t.softcap = params.softcap > 0.f;
  if (!t.softcap) {
    t.scales = true, t.inner = static_cast<float>(params.softmax_scale * kLog2E);
    return t;
  }
  const double outer = params.softcap * kLog2E;
  double to_u = params.softmax_scale / static_cast<double>(params.softcap);  // u = to_u * x
  t.scales = !(to_u > 1e-5 && to_u < 1e5);
  if (t.scales) t.inner = static_cast<float>(to_u), to_u = 1;
  for (int i = 0; i < 3; ++i) t.odd[i] = static_cast<float>(outer * kOdd[i] * std::pow(to_u, 2 * i + 1));
  t.limit = static_cast<float>(kNear / to_u);
  t.outer = static_cast<float>(outer), t.argument = static_cast<float>(2 * kLog2E * to_u);  // 2^(argument * x) = e^(2 * u)
  return t;
}

template <class C, typename T, bool kMasked, bool kTransform>
void launch_sm90a_wgmma_as(DType dtype, const Params& params, const Launch& launch) {
  constexpr float kLog2E = 1.4426950408889634f;
  const bool packed = params.cu_seqlens_q != nullptr;
  if (params.num_heads_q == 0 || (packed ? params.total_q : params.batch * params.seqlen_q) == 0) return;
  const int64_t maps = packed ? 1 : params.batch, rows_q = packed ? params.total_q : params.seqlen_q, rows_k = packed ? params.total_k : params.seqlen_k;
  WgmmaParams p = {};
  const Operand q = operand_of(dtype, params.q, params.q_strides, maps, params.num_heads_q, rows_q, C::kHeadDim, 64);
  // Without keys there is nothing to copy, but a map has an address.
  const Operand k = operand_of(dtype, rows_k > 0 ? params.k : params.out, params.k_strides, maps, params.num_heads_kv, rows_k, C::kHeadDim, C::kTileN);
  const Operand v = operand_of(dtype, rows_k > 0 ? params.v : params.out, params.v_strides, maps, params.num_heads_kv, rows_k, C::kHeadDim, C::kTileN);
  p.q = q.map, p.q_batch = q.batch, p.q_head = q.head;
  p.k = k.map, p.k_batch = k.batch, p.k_head = k.head;
  p.v = v.map, p.v_batch = v.batch, p.v_head = v.head;
  p.out = params.out, p.lse = params.lse, p.out_strides = params.out_strides;
  if (packed) p.out_strides.batch = 0;
  p.lse_batch = packed ? 0 : params.num_heads_q * params.seqlen_q, p.lse_head = packed ? params.total_q : params.seqlen_q;
  p.sequences = sequences_of(params);
  p.transform = transform_of(params);
  p.exponent = kTransform ? 1.f : params.softmax_scale * kLog2E;
  p.slack = std::min(8.f / p.exponent, 1e30f);
  p.group = params.num_heads_q / params.num_heads_kv;
  p.clear_tail = packed || params.seqused_k != nullptr;

  // A group of heads: those whose keys and values are 24 MB together, at least a quarter of the multiprocessors' number, so that four blocks share what
  // they read, whole groups of a head of k, and groups alike in size.
  constexpr int64_t kGroupBytes = int64_t{24} << 20;
  const int64_t pairs = maps * params.num_heads_q, tiles_m = (params.seqlen_q + C::kTileM - 1) / C::kTileM;
  const int64_t fit = kGroupBytes * p.group / std::max<int64_t>(1, params.seqlen_k * C::kHeadDim * 4);
  int64_t per_group = std::min(pairs, std::max<int64_t>(fit, (launch.sm_count + 3) / 4));
  const int64_t groups = (pairs + per_group - 1) / per_group;
  per_group = std::min(pairs, ((pairs + groups - 1) / groups + p.group - 1) / p.group * p.group);
  p.schedule.heads = params.num_heads_q;
  p.schedule.full_heads = (launch.sm_count + 3) / 4;
  p.schedule.full_keys = static_cast<int>(std::max<int64_t>(1, kGroupBytes / (int64_t{params.num_heads_kv} * C::kHeadDim * 4)));
  p.schedule.per_group = static_cast<int>(per_group);
  p.schedule.by_rows = params.causal && (params.window == 0 || 4 * params.window > params.seqlen_k);
  const int64_t most = packed ? (params.total_q / C::kTileM + params.batch) * params.num_heads_q : pairs * tiles_m;
  if (most > 0x7fffffff - 65536) throw std::runtime_error("RuntimeError: sm90a_wgmma: more than 2^31 tiles of queries in one call");
  p.schedule.tiles_m = static_cast<int>(tiles_m);
  p.schedule.total = static_cast<int>(pairs * tiles_m);

  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(most, launch.sm_count)));
  config.block = dim3(C::kThreads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.shared_bytes = kSharedBytes<C>;
  static_assert(kSharedBytes<C> <= 232448);
  constexpr auto kernel = wgmma_attention_kernel<C, T, kMasked, kTransform>;
  dandan::host::allow_shared_memory<kernel>(kSharedBytes<C>);
  dandan::host::launch(kernel, config, p);
}

// A scale that is not above 0 (NaN too) goes into the logits: the largest product would else not be the largest logit, and 0 * -inf is no number.
inline bool needs_transform(const Params& params) { return params.softcap > 0.f || !(params.softmax_scale > 0.f); }

template <int kShape, typename T>
void launch_sm90a_wgmma_shape(DType dtype, const Params& params, const Launch& launch) {
  constexpr WgmmaShape shape = kSm90aWgmmaShapes[kShape];
  using C = WgmmaConfig<shape.head_dim, shape.tile_n, shape.tile_m / 64, shape.slots, shape.queries>;
  static_assert(shape.threads == C::kThreads);
  if (!params.causal && params.window == 0 && !needs_transform(params)) {
    if constexpr (shape.takes_all) return launch_sm90a_wgmma_as<C, T, false, false>(dtype, params, launch);
  } else if constexpr (shape.takes_masks) {
    return needs_transform(params) ? launch_sm90a_wgmma_as<C, T, true, true>(dtype, params, launch)
                                   : launch_sm90a_wgmma_as<C, T, true, false>(dtype, params, launch);
  }
  throw std::runtime_error(std::string("RuntimeError: sm90a_wgmma ") + shape.name + " does not take this mask");
}

template <int kHeadDim, typename T, int... kShapes>
void launch_sm90a_wgmma_any(DType dtype, const Params& params, const Launch& launch, std::integer_sequence<int, kShapes...>) {
  const auto with = [&](auto shape) {
    constexpr int kShape = decltype(shape)::value;
    if constexpr (kSm90aWgmmaShapes[kShape].head_dim == kHeadDim) {
      if (launch.config == kShape) return launch_sm90a_wgmma_shape<kShape, T>(dtype, params, launch), true;
    }
    return false;
  };
  if (!(with(std::integral_constant<int, kShapes>{}) || ...)) no_configuration("sm90a_wgmma", launch.config, kHeadDim);
}

template <int kHeadDim, typename T>
void launch_sm90a_wgmma_of(DType dtype, const Params& params, const Launch& launch) {
  launch_sm90a_wgmma_any<kHeadDim, T>(dtype, params, launch, std::make_integer_sequence<int, kSm90aWgmmaShapeCount>{});
}

void launch_sm90a_wgmma_d64_f16(DType dtype, const Params& params, const Launch& launch);
void launch_sm90a_wgmma_d64_bf16(DType dtype, const Params& params, const Launch& launch);
void launch_sm90a_wgmma_d128_f16(DType dtype, const Params& params, const Launch& launch);
void launch_sm90a_wgmma_d128_bf16(DType dtype, const Params& params, const Launch& launch);
void launch_sm90a_wgmma_d256_f16(DType dtype, const Params& params, const Launch& launch);
void launch_sm90a_wgmma_d256_bf16(DType dtype, const Params& params, const Launch& launch);

}  // namespace dandan_attention
