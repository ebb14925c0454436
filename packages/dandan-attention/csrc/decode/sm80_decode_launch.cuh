// What the units that hold sm80_decode's instantiations share, one unit for each head_dim.
#pragma once

#include <algorithm>

#include "decode_configs.h"
#include "launch.h"
#include "sm80_decode_attention.cuh"
#include "sm80_decode_combine.cuh"

namespace dandan_attention {

// How a call is divided; no lengths in it.
struct DecodeGrid {
  int rows, row_tiles, parts, slots;  // parts: blocks of a row tile; slots: parts that may go to the workspace
  DecodeGrid(const DecodeParams& p, const DecodeLaunch& l, const DecodeShape& shape) {
    rows = p.seqlen_q * (p.num_heads_q / p.num_heads_kv);
    row_tiles = (rows + shape.warp_m - 1) / shape.warp_m;
    const int64_t fixed = p.batch * p.num_heads_kv * p.num_splits;
    if (fixed * row_tiles > 0x7fffffff) throw std::runtime_error("RuntimeError: sm80_decode: more than 2^31 - 1 blocks in one call");
    parts = p.num_splits > 0 ? static_cast<int>(fixed) : std::max(1, l.sm_count * shape.blocks / row_tiles);
    slots = p.num_splits == 1 ? 0 : p.num_splits > 0 ? parts : 2 * parts;
  }
  int64_t part_rows(const DecodeShape& shape) const { return int64_t{slots} * row_tiles * shape.warp_m; }
};

template <int kShape, typename T>
void launch_sm80_decode_shape(const DecodeParams& params, const DecodeLaunch& launch) {
  constexpr DecodeShape shape = kSm80DecodeShapes[kShape];
  using C = DecodeConfig<shape.head_dim, shape.warp_m, shape.warp_n, shape.warps, shape.stages, shape.q_in_registers, shape.blocks>;
  static_assert(shape.threads == C::kThreads && shape.tile_n == C::kTileKeys && shape.shared_bytes == C::kSharedBytes);
  constexpr float kLog2E = 1.4426950408889634f;
  if (params.batch == 0 || params.seqlen_q == 0 || params.num_heads_q == 0) return;
  const DecodeGrid grid(params, launch, shape);
  DecodeKernelParams p;
  p.q = params.q, p.k = params.k, p.v = params.v, p.out = params.out, p.lse = params.lse;
  p.part_out = static_cast<float*>(params.workspace);
  p.part_lse = p.part_out + grid.part_rows(shape) * C::kHeadDim;
  p.q_strides = params.q_strides, p.out_strides = params.out_strides;
  p.k_page = params.k_strides.page * 2, p.k_slot = params.k_strides.slot * 2, p.k_head = params.k_strides.head * 2;
  p.v_page = params.v_strides.page * 2, p.v_slot = params.v_strides.slot * 2, p.v_head = params.v_strides.head * 2;
  p.page_table = params.page_table, p.table_stride = params.table_stride;
  p.num_pages = static_cast<uint32_t>(std::min<int64_t>(params.num_pages, int64_t{1} << 31)), p.page_size = static_cast<uint32_t>(params.page_size);

  // A window from the farthest query on shows all keys; keys are counted in 31 bits, with room for a tile.
  constexpr int64_t kMostKeys = 0x7fff0000;
  const int64_t capacity = std::min(kMostKeys, params.max_pages * params.page_size);
  p.schedule = {params.seqused_k, std::min(params.window, kMostKeys), static_cast<int>(capacity), static_cast<int>(params.batch), params.num_heads_kv,
                params.seqlen_q,  grid.parts, params.num_splits};
  if (params.num_splits == 0 && params.batch * params.num_heads_kv * (capacity / C::kTileKeys + 2) > 0x7fffffff) {
    throw std::runtime_error("RuntimeError: sm80_decode: more than 2^31 - 1 tiles of keys in one call");
  }
  p.num_heads_q = params.num_heads_q, p.group = params.num_heads_q / params.num_heads_kv;
  p.rows = grid.rows, p.row_tiles = grid.row_tiles;

  // As in launch_sm80_mma_shape.
  const bool fold = params.softmax_scale > 0.f;
  p.transform = params.softcap > 0.f ? MmaTransform::kSoftcap : fold ? MmaTransform::kNone : MmaTransform::kScale;
  p.before = params.softcap > 0.f ? 2.f * kLog2E * params.softmax_scale / params.softcap : params.softmax_scale;
  p.exponent = kLog2E * (params.softcap > 0.f ? params.softcap : fold ? params.softmax_scale : 1.f);
  const Strides& o = params.out_strides;
  p.by_ends = false;
  p.vector_out = reinterpret_cast<uintptr_t>(params.out) % 8 == 0 && (o.batch | o.head | o.row) % 4 == 0;

  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid.parts) * static_cast<unsigned>(grid.row_tiles));
  config.block = dim3(shape.threads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.shared_bytes = shape.shared_bytes;
  constexpr auto kernel = sm80_decode_attention_kernel<T, C>;
  dandan::host::allow_shared_memory<kernel>(shape.shared_bytes);
  dandan::host::launch(kernel, config, p);
  if (grid.slots == 0) return;

  const int64_t pairs = params.batch * params.num_heads_kv;
  p.by_ends = params.num_splits == 0 && pairs > grid.parts;
  const int64_t out_rows = (p.by_ends ? grid.parts : pairs) * grid.rows;  // the last stretch's end cuts nothing, but one block has to wait
  if (out_rows > 0x7fffffff) throw std::runtime_error("RuntimeError: sm80_decode: more than 2^31 - 1 rows in one call");
  dandan::host::LaunchConfig second;
  second.grid = dim3(static_cast<unsigned>(out_rows));
  second.block = dim3(kCombineThreads);
  second.stream = launch.stream;
  second.dependent = launch.chained;
  constexpr auto combine = sm80_decode_combine_kernel<T, C>;
  dandan::host::launch(combine, second, p);
}

void launch_sm80_decode_d64(DType dtype, const DecodeParams& params, const DecodeLaunch& launch);
void launch_sm80_decode_d128(DType dtype, const DecodeParams& params, const DecodeLaunch& launch);
void launch_sm80_decode_d256(DType dtype, const DecodeParams& params, const DecodeLaunch& launch);

}  // namespace dandan_attention
