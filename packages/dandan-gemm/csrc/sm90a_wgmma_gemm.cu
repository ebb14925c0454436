#include "sm90a_wgmma_gemm.cuh"

#include "configs.h"
#include "launch.h"
#include "tma_launch.h"

namespace dandan_gemm {
namespace {

// Row tiles that share columns of b in L2: measured on an H200 (2026-12), 8, 16 and 32 were within 2% of each other.
constexpr int kRaster = 8;

template <class C>
WgmmaParams wgmma_params(DType dtype, const Params& params, const Launch& launch) {
  WgmmaParams p = {};
  p.a = operand_map(dtype, params.a, params.m, params.k, params.a_stride, C::kTileM, kSliceK);
  p.b = params.weight_transposed ? operand_map(dtype, params.b, params.n, params.k, params.b_stride, C::kTileN, kSliceK)
                                 : operand_map(dtype, params.b, params.k, params.n, params.b_stride, kSliceK, 64);
  p.out_data = params.out;
  p.bias = params.bias;
  p.out_stride = params.out_stride;
  p.m = static_cast<int>(params.m);
  p.n = static_cast<int>(params.n);
  p.slices = static_cast<int>((params.k + kSliceK - 1) / kSliceK);
  p.tiles_m = (p.m + C::kTileM - 1) / C::kTileM;
  p.tiles_n = (p.n + C::kTileN - 1) / C::kTileN;
  p.raster = kRaster;
  p.vector_out = reinterpret_cast<uintptr_t>(params.out) % 16 == 0 && params.out_stride % 8 == 0;
  p.static_weight = launch.static_weight;
  p.weight_once = p.tiles_m == 1;
  return p;
}

template <class C, typename T, bool kWeightOuter>
void launch_persistent(DType dtype, const Params& params, const Launch& launch) {
  WgmmaParams p = wgmma_params<C>(dtype, params, launch);
  p.vector_out = p.vector_out && params.n % 8 == 0;  // the copy engine was seen to write the rest of a last, partial 16 bytes
  if (p.vector_out) p.out = operand_map(dtype, params.out, params.m, params.n, params.out_stride, 64, 64);
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(static_cast<int64_t>(p.tiles_m) * p.tiles_n, launch.sm_count)));
  config.block = dim3(C::kThreads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.shared_bytes = kPersistentShared<C>;
  constexpr auto kernel = wgmma_persistent_kernel<T, C, kWeightOuter>;
  dandan::host::allow_shared_memory<kernel>(kPersistentShared<C>);
  dandan::host::launch(kernel, config, p);
}

template <class C, typename T, bool kWeightOuter, int kSplit>
void launch_split(DType dtype, const Params& params, const Launch& launch) {
  const WgmmaParams p = wgmma_params<C>(dtype, params, launch);
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(static_cast<int64_t>(p.tiles_m) * p.tiles_n * kSplit));
  config.block = dim3(C::kThreads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.cluster = kSplit;
  config.shared_bytes = kSplitShared<C, kSplit>;
  constexpr auto kernel = wgmma_split_kernel<T, C, kWeightOuter, kSplit>;
  dandan::host::allow_shared_memory<kernel>(kSplitShared<C, kSplit>);
  dandan::host::launch(kernel, config, p);
}

template <int kShape, typename T, bool kTransposed>
void launch_shape(DType dtype, const Params& params, const Launch& launch) {
  constexpr WgmmaShape shape = kSm90aWgmmaShapes[kShape];
  using C = WgmmaConfig<shape.swap ? shape.tile_n : shape.tile_m, shape.swap ? shape.tile_m : shape.tile_n, shape.stages, shape.swap, shape.blocks_x>;
  if constexpr (kTransposed || shape.takes_kn()) {
    if constexpr (shape.persistent) {
      if (launch.tile.split == 1) return launch_persistent<C, T, !kTransposed>(dtype, params, launch);
    } else {
      const auto with = [&](auto split) {
        constexpr int kSplit = decltype(split)::value;
        if constexpr ((kSm90aWgmmaShapes[kShape].splits >> kSplit & 1) != 0) {
          if (launch.tile.split == kSplit) return launch_split<C, T, !kTransposed, kSplit>(dtype, params, launch), true;
        }
        return false;
      };
      if (with(std::integral_constant<int, 1>{}) || with(std::integral_constant<int, 2>{}) || with(std::integral_constant<int, 3>{}) ||
          with(std::integral_constant<int, 4>{})) {
        return;
      }
    }
  }
  throw std::runtime_error(std::string("RuntimeError: sm90a_wgmma ") + shape.name + " does not take this layout or number of slices");
}

template <typename T, bool kTransposed, int... kShapes>
void launch_any(DType dtype, const Params& params, const Launch& launch, std::integer_sequence<int, kShapes...>) {
  const bool found = ((launch.tile.config == kShapes && (launch_shape<kShapes, T, kTransposed>(dtype, params, launch), true)) || ...);
  if (!found) no_configuration("sm90a_wgmma", launch.tile.config);
}

}  // namespace

void launch_sm90a_wgmma(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, params.weight_transposed, [&](auto element, auto transposed) {
    launch_any<decltype(element), decltype(transposed)::value>(dtype, params, launch, std::make_integer_sequence<int, kSm90aWgmmaShapeCount>{});
  });
}

}  // namespace dandan_gemm
