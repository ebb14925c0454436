#include "skinny_gemm.cuh"

#include "configs.h"
#include "launch.h"

namespace dandan_gemm {
namespace {

template <typename T, int kShape, int kHalves, bool kCluster>
void launch_shape(const Params& params, const Launch& launch) {
  constexpr SkinnyShape shape = kSkinnyShapes[kShape];
  SkinnyParams p = {};
  p.a = params.a;
  p.b = params.b;
  p.bias = params.bias;
  p.out = params.out;
  p.m = static_cast<int>(params.m);
  p.n = static_cast<int>(params.n);
  p.k = static_cast<int>(params.k);
  p.a_stride = params.a_stride;
  p.b_stride = params.b_stride;
  p.out_stride = params.out_stride;
  p.split = launch.tile.split;
  p.static_weight = launch.static_weight;
  constexpr int kShared = skinny_shared_bytes<shape.groups, kHalves, shape.warps>(kCluster ? kMaxSkinnySplit : 1);
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((params.n + 8 * shape.groups - 1) / (8 * shape.groups) * launch.tile.split));
  config.block = dim3(shape.warps * 32);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.cluster = launch.tile.split;
  config.shared_bytes = kShared;
  constexpr auto kernel = skinny_kernel<T, shape.groups, kHalves, shape.chunks, shape.warps, shape.depth, kCluster>;
  if constexpr (kShared > 48 * 1024) dandan::host::allow_shared_memory<kernel>(kShared);
  dandan::host::launch(kernel, config, p);
}

template <typename T, int kShape>
void launch_split(const Params& params, const Launch& launch) {
  if (launch.tile.split == 1) return params.m <= 8 ? launch_shape<T, kShape, 1, false>(params, launch) : launch_shape<T, kShape, 2, false>(params, launch);
  return params.m <= 8 ? launch_shape<T, kShape, 1, true>(params, launch) : launch_shape<T, kShape, 2, true>(params, launch);
}

template <typename T, int... kShapes>
void launch_any(const Params& params, const Launch& launch, std::integer_sequence<int, kShapes...>) {
  const bool found = ((launch.tile.config == kShapes && (launch_split<T, kShapes>(params, launch), true)) || ...);
  if (!found) no_configuration("skinny", launch.tile.config);
}

}  // namespace

void launch_skinny(DType dtype, const Params& params, const Launch& launch) {
  const auto run = [&](auto element) { launch_any<decltype(element)>(params, launch, std::make_integer_sequence<int, kSkinnyShapeCount>{}); };
  return dtype == DType::kHalf ? run(__half{}) : run(__nv_bfloat16{});
}

}  // namespace dandan_gemm
