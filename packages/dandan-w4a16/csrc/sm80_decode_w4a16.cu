#include "sm80_decode_w4a16.cuh"

#include "configs.h"
#include "launch.h"

namespace dandan_w4a16 {
namespace {

template <typename T, class C, bool kSplit>
void launch_form(const Params& params, const Launch& launch) {
  DecodeParams p = {};
  p.x = params.x;
  p.codes = params.codes;
  p.scales = params.scales;
  p.bias = params.bias;
  p.out = params.out;
  p.x_stride = params.x_stride;
  p.out_stride = params.out_stride;
  p.m = static_cast<int>(params.m);
  p.n = static_cast<int>(params.n);
  p.k = static_cast<int>(params.k);
  p.blocks_k = static_cast<int>(padded(params.k) / kBlock);
  p.split = launch.tile.split;
  constexpr int kShared = C::shared_bytes(kSplit ? kMaxDecodeSplit : 1);
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((params.n + 16 * C::kTiles - 1) / (16 * C::kTiles) * launch.tile.split));
  config.block = dim3(C::kWarps * 32);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.cluster = launch.tile.split;
  config.shared_bytes = kShared;
  constexpr auto kernel = decode_kernel<T, C, kSplit>;
  if constexpr (kShared > 48 * 1024) dandan::host::allow_shared_memory<kernel>(kShared);
  dandan::host::launch(kernel, config, p);
}

template <typename T, int kGroup, int kShape>
void launch_shape(const Params& params, const Launch& launch) {
  constexpr DecodeShape s = kDecodeShapes[kShape];
  using Few = DecodeConfig<s.tiles, 1, s.warps, s.depth, kGroup>;
  using Many = DecodeConfig<s.tiles, 2, s.warps, s.depth, kGroup>;
  if (launch.tile.split < 1 || launch.tile.split > kMaxDecodeSplit) no_configuration("sm80_decode", launch.tile);
  if (launch.tile.split == 1) return params.m <= 8 ? launch_form<T, Few, false>(params, launch) : launch_form<T, Many, false>(params, launch);
  return params.m <= 8 ? launch_form<T, Few, true>(params, launch) : launch_form<T, Many, true>(params, launch);
}

template <typename T, int kGroup, int... kShapes>
void launch_any(const Params& params, const Launch& launch, std::integer_sequence<int, kShapes...>) {
  const bool found = ((launch.tile.config == kShapes && (launch_shape<T, kGroup, kShapes>(params, launch), true)) || ...);
  if (!found) no_configuration("sm80_decode", launch.tile);
}

}  // namespace

void launch_sm80_decode(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, params.group, [&](auto element, auto group) {
    launch_any<decltype(element), decltype(group)::value>(params, launch, std::make_integer_sequence<int, kDecodeShapeCount>{});
  });
}

}  // namespace dandan_w4a16
