#include "sm80_mma_w4a16.cuh"

#include "configs.h"
#include "launch.h"

namespace dandan_w4a16 {
namespace {

template <typename T, int kShape, int kGroupsOfBlock>
void launch_shape(const Params& params, const Launch& launch) {
  constexpr MmaShape s = kMmaShapes[kShape];
  using C = MmaConfig<s.tokens, s.columns, s.warp_tokens, s.warp_columns, s.stages, kGroupsOfBlock>;
  MmaParams p = {};
  p.x = params.x;
  p.codes = params.codes;
  p.scales = params.scales;
  p.bias = params.bias;
  p.out = params.out;
  p.split = launch.tile.split;
  p.partials = p.split > 1 ? static_cast<float*>(launch.workspace) : nullptr;
  p.x_stride = params.m == 1 ? padded(params.k) : params.x_stride;  // of a single row it means nothing
  p.out_stride = params.out_stride;
  p.m = static_cast<int>(params.m);
  p.n = static_cast<int>(params.n);
  p.k = static_cast<int>(params.k);
  p.blocks_k = static_cast<int>(padded(params.k) / kBlock);
  p.groups_k = static_cast<int>(groups_of(params.k, params.group));
  p.tiles_m = static_cast<int>((params.m + C::kTokens - 1) / C::kTokens);
  p.tiles_n = static_cast<int>((params.n + C::kColumns - 1) / C::kColumns);
  p.group_shift = params.group == 128 ? 1 : 0;
  p.vector_out = reinterpret_cast<uintptr_t>(params.out) % 16 == 0 && (params.out_stride % 8 == 0 || params.m == 1);
  p.weights_first = launch.dependent;
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.tiles_m) * static_cast<unsigned>(p.tiles_n), static_cast<unsigned>(p.split));
  config.block = dim3(C::kThreads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.shared_bytes = C::kSharedBytes;
  constexpr auto kernel = mma_kernel<T, C>;
  dandan::host::allow_shared_memory<kernel>(C::kSharedBytes);
  dandan::host::launch(kernel, config, p);
  if (p.partials == nullptr) return;
  const tile::SplitSum sum = {p.partials, p.bias, p.out, p.out_stride, params.m, params.n, p.split};
  config.grid = dim3(static_cast<unsigned>(sum.blocks()));
  config.block = dim3(tile::kSplitSumThreads);
  config.shared_bytes = 0;
  dandan::host::launch(sum.by_fours() ? tile::split_sum_kernel<T, 4> : tile::split_sum_kernel<T, 1>, config, sum);
}

template <typename T, int kGroupsOfBlock, int... kShapes>
void launch_any(const Params& params, const Launch& launch, std::integer_sequence<int, kShapes...>) {
  const bool found = launch.tile.split >= 1 && launch.tile.split <= kMaxMmaSplit &&
                     ((launch.tile.config == kShapes && (launch_shape<T, kShapes, kGroupsOfBlock>(params, launch), true)) || ...);
  if (!found) no_configuration("sm80_mma", launch.tile);
}

}  // namespace

void launch_sm80_mma(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, params.group, [&](auto element, auto group) {
    constexpr int kGroupsOfBlock = decltype(group)::value < kBlock ? kBlock / decltype(group)::value : 1;  // 64 and 128 are one kernel
    launch_any<decltype(element), kGroupsOfBlock>(params, launch, std::make_integer_sequence<int, kMmaShapeCount>{});
  });
}

}  // namespace dandan_w4a16
