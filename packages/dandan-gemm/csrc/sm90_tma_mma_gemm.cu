#include "sm90_tma_mma_gemm.cuh"

#include "configs.h"
#include "launch.h"
#include "split_reduce.cuh"
#include "tma_launch.h"

namespace dandan_gemm {
namespace {

template <int kShape, typename T, bool kWeightTransposed>
void launch_shape(DType dtype, const Params& params, const Launch& launch) {
  constexpr MmaShape shape = kSm90TmaMmaShapes[kShape];
  using C = MmaConfig<shape.tile_m, shape.tile_n, shape.tile_k, shape.warp_m, shape.warp_n, shape.stages>;
  static_assert(shape.threads == C::kWarps * 32 && shape.shared_bytes == C::kNumStages * C::kStageBytes + 1024 + 16 * C::kNumStages &&
                shape.shared_bytes <= kMaxMmaSharedBytes);
  Sm90TmaMmaParams p;
  p.output = mma_output<C>(params, launch);
  p.static_weight = launch.static_weight;
  const CUtensorMap a = operand_map(dtype, params.a, params.m, params.k, params.a_stride, C::kTileM, C::kTileK);
  const CUtensorMap b = kWeightTransposed ? operand_map(dtype, params.b, params.n, params.k, params.b_stride, C::kTileN, C::kTileK)
                                          : operand_map(dtype, params.b, params.k, params.n, params.b_stride, C::kTileK, 64);
  // Two blocks a multiprocessor where its shared memory holds them; where it does not, the second half of the grid starts when the first has ended.
  const int64_t items = static_cast<int64_t>(p.output.tiles_m) * p.output.tiles_n * p.output.split;
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(items, 2 * static_cast<int64_t>(launch.sm_count))));
  config.block = dim3(shape.threads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.shared_bytes = shape.shared_bytes;
  constexpr auto kernel = sm90_tma_mma_gemm_kernel<T, C, kWeightTransposed>;
  dandan::host::allow_shared_memory<kernel>(shape.shared_bytes);
  dandan::host::launch(kernel, config, a, b, p);
  if (p.output.split > 1) launch_split_reduce<T>(params, launch);
}

}  // namespace

void launch_sm90_tma_mma(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, params.weight_transposed, [&](auto element, auto transposed) {
    using T = decltype(element);
    constexpr bool kTransposed = decltype(transposed)::value;
    static_assert(kSm90TmaMmaShapeCount == 7);
    switch (launch.tile.config) {
      case 0: return launch_shape<0, T, kTransposed>(dtype, params, launch);
      case 1: return launch_shape<1, T, kTransposed>(dtype, params, launch);
      case 2: return launch_shape<2, T, kTransposed>(dtype, params, launch);
      case 3: return launch_shape<3, T, kTransposed>(dtype, params, launch);
      case 4: return launch_shape<4, T, kTransposed>(dtype, params, launch);
      case 5: return launch_shape<5, T, kTransposed>(dtype, params, launch);
      case 6: return launch_shape<6, T, kTransposed>(dtype, params, launch);
    }
    no_configuration("sm90_tma_mma", launch.tile.config);
  });
}

}  // namespace dandan_gemm
