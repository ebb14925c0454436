#include "sm80_mma_gemm.cuh"

#include "configs.h"
#include "launch.h"
#include "split_reduce.cuh"

namespace dandan_gemm {
namespace {

// Bytes of the widest copy that every row of an operand allows.
int copy_width(const void* data, int64_t stride, int64_t rows) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const int64_t step = rows > 1 ? stride : 0;
  if (address % 16 == 0 && step % 8 == 0) return 16;
  return address % 4 == 0 && step % 2 == 0 ? 4 : 2;
}

template <int kShape, typename T, bool kWeightTransposed>
void launch_shape(const Params& params, const Launch& launch) {
  constexpr MmaShape shape = kSm80MmaShapes[kShape];
  using C = MmaConfig<shape.tile_m, shape.tile_n, shape.tile_k, shape.warp_m, shape.warp_n, shape.stages>;
  static_assert(shape.threads == C::kWarps * 32 && shape.shared_bytes == C::kNumStages * C::kStageBytes && shape.shared_bytes <= kMaxMmaSharedBytes);
  Sm80MmaParams p;
  p.a = params.a, p.b = params.b;
  p.a_stride = params.a_stride, p.b_stride = params.b_stride;
  p.output = mma_output<C>(params, launch);
  p.last_k = static_cast<int>(params.k - static_cast<int64_t>(p.output.tiles_k - 1) * C::kTileK);
  p.a_width = copy_width(params.a, params.a_stride, params.m);
  p.b_width = copy_width(params.b, params.b_stride, kWeightTransposed ? params.n : params.k);
  p.static_weight = launch.static_weight;
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.output.tiles_m) * static_cast<unsigned>(p.output.tiles_n), static_cast<unsigned>(p.output.split));
  config.block = dim3(shape.threads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  config.shared_bytes = shape.shared_bytes;
  constexpr auto kernel = sm80_mma_gemm_kernel<T, C, kWeightTransposed>;
  dandan::host::allow_shared_memory<kernel>(shape.shared_bytes);
  dandan::host::launch(kernel, config, p);
  if (p.output.split > 1) launch_split_reduce<T>(params, launch);
}

}  // namespace

void launch_sm80_mma(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, params.weight_transposed, [&](auto element, auto transposed) {
    using T = decltype(element);
    constexpr bool kTransposed = decltype(transposed)::value;
    static_assert(kSm80MmaShapeCount == 9);
    switch (launch.tile.config) {
      case 0: return launch_shape<0, T, kTransposed>(params, launch);
      case 1: return launch_shape<1, T, kTransposed>(params, launch);
      case 2: return launch_shape<2, T, kTransposed>(params, launch);
      case 3: return launch_shape<3, T, kTransposed>(params, launch);
      case 4: return launch_shape<4, T, kTransposed>(params, launch);
      case 5: return launch_shape<5, T, kTransposed>(params, launch);
      case 6: return launch_shape<6, T, kTransposed>(params, launch);
      case 7: return launch_shape<7, T, kTransposed>(params, launch);
      case 8: return launch_shape<8, T, kTransposed>(params, launch);
    }
    no_configuration("sm80_mma", launch.tile.config);
  });
}

}  // namespace dandan_gemm
