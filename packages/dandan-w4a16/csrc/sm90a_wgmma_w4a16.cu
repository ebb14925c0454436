#include "sm90a_wgmma_w4a16.cuh"

#include <dandan/host/tensor_map.h>

#include "configs.h"
#include "launch.h"

namespace dandan_w4a16 {
namespace {

template <typename T, class C, int kSplit>
void launch_form(DType dtype, const Params& params, const Launch& launch) {
  WgmmaParams p = {};
  const auto type = dtype == DType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const int64_t stride = params.m == 1 ? padded(params.k) : params.x_stride;  // of a single row it means nothing
  p.x = dandan::host::make_tensor_map_2d(params.x, type, params.k, params.m, stride, kBlock, C::kTokens);
  p.codes = params.codes;
  p.scales = params.scales;
  p.bias = params.bias;
  p.out = params.out;
  p.out_stride = params.out_stride;
  p.m = static_cast<int>(params.m);
  p.n = static_cast<int>(params.n);
  p.blocks_k = static_cast<int>(padded(params.k) / kBlock);
  p.groups_k = (p.blocks_k * kBlock + C::kGroup - 1) / C::kGroup;
  p.tiles_m = (p.m + C::kTokens - 1) / C::kTokens;
  p.vector_out = reinterpret_cast<uintptr_t>(params.out) % 16 == 0 && params.out_stride % 8 == 0;
  p.weight_once = p.tiles_m == 1;
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(static_cast<int64_t>(p.tiles_m) * ((p.n + C::kTileN - 1) / C::kTileN) * kSplit));
  config.block = dim3(C::kThreads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.cluster = kSplit;
  config.shared_bytes = C::template kSharedBytes<kSplit>;
  constexpr auto kernel = wgmma_kernel<T, C, kSplit>;
  dandan::host::allow_shared_memory<kernel>(C::template kSharedBytes<kSplit>);
  dandan::host::launch(kernel, config, p);
}

template <typename T, int kGroup, int kShape>
void launch_shape(DType dtype, const Params& params, const Launch& launch) {
  constexpr WgmmaShape s = kWgmmaShapes[kShape];
  using C = WgmmaConfig<s.tokens, s.consumers, s.stages, kGroup>;
  const auto with = [&](auto split) {
    constexpr int kSplit = decltype(split)::value;
    if constexpr ((kWgmmaShapes[kShape].splits >> kSplit & 1) != 0) {
      if (launch.tile.split == kSplit) return launch_form<T, C, kSplit>(dtype, params, launch), true;
    }
    return false;
  };
  if (!with(std::integral_constant<int, 1>{}) && !with(std::integral_constant<int, 2>{}) && !with(std::integral_constant<int, 3>{}) &&
      !with(std::integral_constant<int, 4>{})) {
    no_configuration("sm90a_wgmma", launch.tile);
  }
}

template <typename T, int kGroup, int... kShapes>
void launch_any(DType dtype, const Params& params, const Launch& launch, std::integer_sequence<int, kShapes...>) {
  const bool found = ((launch.tile.config == kShapes && (launch_shape<T, kGroup, kShapes>(dtype, params, launch), true)) || ...);
  if (!found) no_configuration("sm90a_wgmma", launch.tile);
}

}  // namespace

void launch_sm90a_wgmma(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, params.group, [&](auto element, auto group) {
    launch_any<decltype(element), decltype(group)::value>(dtype, params, launch, std::make_integer_sequence<int, kWgmmaShapeCount>{});
  });
}

}  // namespace dandan_w4a16
