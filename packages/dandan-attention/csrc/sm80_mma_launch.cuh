// What the units that hold sm80_mma's instantiations share, one unit for each head_dim.
#pragma once

#include <algorithm>
#include <cmath>

#include "configs.h"
#include "launch.h"
#include "sm80_mma_attention.cuh"

namespace dandan_attention {

template <int kShape, typename T>
void launch_sm80_mma_shape(const Params& params, const Launch& launch) {
  constexpr MmaShape shape = kSm80MmaShapes[kShape];
  using C = MmaConfig<shape.head_dim, shape.tile_m, shape.tile_n, shape.warps, shape.slots, shape.q_in_registers, shape.blocks>;
  static_assert(shape.threads == C::kThreads && shape.shared_bytes == C::kSharedBytes);
  constexpr float kLog2E = 1.4426950408889634f;
  Sm80MmaParams p;
  p.q = params.q, p.k = params.k, p.v = params.v, p.out = params.out, p.lse = params.lse;
  p.q_strides = params.q_strides, p.k_strides = params.k_strides, p.v_strides = params.v_strides, p.out_strides = params.out_strides;
  p.sequences = sequences_of(params);
  p.num_heads_q = params.num_heads_q;
  p.group = params.num_heads_q / params.num_heads_kv;
  p.q_row = params.q_strides.row * 2, p.k_row = params.k_strides.row * 2, p.v_row = params.v_strides.row * 2;

  // A scale that is not above 0 (NaN too) goes into the logits: the largest product would else not be the largest logit, and 0 * -inf is no number.
  const bool fold = params.softmax_scale > 0.f;
  p.transform = params.softcap > 0.f ? MmaTransform::kSoftcap : fold ? MmaTransform::kNone : MmaTransform::kScale;
  p.before = params.softcap > 0.f ? 2.f * kLog2E * params.softmax_scale / params.softcap : params.softmax_scale;
  p.exponent = kLog2E * (params.softcap > 0.f ? params.softcap : fold ? params.softmax_scale : 1.f);

  // Heads side by side: as many as have their keys and values in a part of L2 that two halves of it may hold twice; whole groups of a head of k.
  constexpr int64_t kSectionBytes = int64_t{16} << 20;
  const int64_t pairs = params.batch * params.num_heads_q, tiles_m = (params.seqlen_q + C::kTileM - 1) / C::kTileM;
  const int64_t keys = params.window > 0 ? std::min(params.seqlen_k, params.window + C::kTileM) : params.seqlen_k;
  const int64_t heads_kv = std::max<int64_t>(1, kSectionBytes / std::max<int64_t>(1, keys * C::kHeadDim * 4));
  if (pairs == 0 || tiles_m == 0) return;
  if (pairs * tiles_m > 0x7fffffff) throw std::runtime_error("RuntimeError: sm80_mma: more than 2^31 - 1 tiles of queries in one call");
  p.pairs = static_cast<uint32_t>(pairs), p.tiles_m = static_cast<uint32_t>(tiles_m);
  p.section = static_cast<uint32_t>(std::min(pairs, heads_kv * p.group));
  const Strides& o = params.out_strides;
  p.vector_out = reinterpret_cast<uintptr_t>(params.out) % 16 == 0 && (o.batch | o.head | o.row) % 8 == 0;

  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(pairs * tiles_m));
  config.block = dim3(shape.threads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.shared_bytes = shape.shared_bytes;
  constexpr auto kernel = sm80_mma_attention_kernel<T, C>;
  dandan::host::allow_shared_memory<kernel>(shape.shared_bytes);
  dandan::host::launch(kernel, config, p);
}

void launch_sm80_mma_d64(DType dtype, const Params& params, const Launch& launch);
void launch_sm80_mma_d128(DType dtype, const Params& params, const Launch& launch);
void launch_sm80_mma_d256(DType dtype, const Params& params, const Launch& launch);

}  // namespace dandan_attention
