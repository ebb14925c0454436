#include "sm90_decode_w4a16.cuh"

#include <dandan/host/tensor_map.h>

#include "configs.h"
#include "launch.h"

namespace dandan_w4a16 {
namespace {

template <typename T, class C>
void launch_form(DType dtype, const Params& params, const Launch& launch) {
  RingParams p = {};
  const auto type = dtype == DType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const int64_t stride = params.m == 1 ? padded(params.k) : params.x_stride;  // of a single row it means nothing
  p.x = dandan::host::make_tensor_map_2d(params.x, type, params.k, params.m, stride, kBlock, static_cast<int>(params.m));
  p.codes = params.codes;
  p.scales = params.scales;
  p.bias = params.bias;
  p.out = params.out;
  p.out_stride = params.out_stride;
  p.m = static_cast<int>(params.m);
  p.n = static_cast<int>(params.n);
  p.blocks_k = static_cast<int>(padded(params.k) / kBlock);
  p.groups_k = static_cast<int>(groups_of(params.k, params.group));
  p.split = launch.tile.split;
  const int shared = C::shared_bytes(p.split);
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((params.n + 16 * C::kTiles - 1) / (16 * C::kTiles) * p.split));
  config.block = dim3(C::kWarps * 32);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.cluster = p.split;
  config.shared_bytes = shared;
  constexpr auto kernel = ring_kernel<T, C>;
  dandan::host::allow_shared_memory<kernel>(C::shared_bytes(kMaxRingSplit));
  dandan::host::launch(kernel, config, p);
}

template <typename T, int kGroup, int kShape>
void launch_shape(DType dtype, const Params& params, const Launch& launch) {
  if (launch.tile.split < 1 || launch.tile.split > kMaxRingSplit) no_configuration("sm90_decode", launch.tile);
  const auto with = [&](auto halves) {
    constexpr int kHalves = decltype(halves)::value;
    constexpr RingShape s = kRingShapes[kShape];
    if constexpr (kHalves >= s.halves && 8 * kHalves <= s.tokens) {
      if (params.m <= 8 * kHalves) return launch_form<T, RingConfig<s.tiles, kHalves, s.warps, s.resident, kGroup>>(dtype, params, launch), true;
    }
    return false;
  };
  if (!with(std::integral_constant<int, 1>{}) && !with(std::integral_constant<int, 2>{}) && !with(std::integral_constant<int, 4>{}) &&
      !with(std::integral_constant<int, 8>{})) {
    no_configuration("sm90_decode", launch.tile);
  }
}

template <typename T, int kGroup, int... kShapes>
void launch_any(DType dtype, const Params& params, const Launch& launch, std::integer_sequence<int, kShapes...>) {
  const bool found = ((launch.tile.config == kShapes && (launch_shape<T, kGroup, kShapes>(dtype, params, launch), true)) || ...);
  if (!found) no_configuration("sm90_decode", launch.tile);
}

}  // namespace

void launch_sm90_decode(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, params.group, [&](auto element, auto group) {
    launch_any<decltype(element), decltype(group)::value>(dtype, params, launch, std::make_integer_sequence<int, kRingShapeCount>{});
  });
}

}  // namespace dandan_w4a16
