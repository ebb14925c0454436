#include "sm80_elementwise.cuh"

#include "launch.h"

namespace dandan_norm {
namespace {

template <typename T>
void launch_aligned(DType dtype, const Params& params, const Launch& launch) {
  GluParams p = {aligned_rows(dtype, params, params.x), aligned_rows(dtype, params, params.other), aligned_rows(dtype, params, params.out),
                 aligned_space(dtype, params)};
  auto config = row_config(params.space.rows, launch);
  config.grid.y = static_cast<unsigned>((p.space.vectors + launch.tile.threads - 1) / launch.tile.threads);
  dandan::host::launch(sm80_elementwise_kernel<T>, config, p);
}

}  // namespace

void launch_sm80_elementwise(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    if (!launch.vectorized) return dandan::host::launch(sm80_elementwise_any_kernel<T>, row_config(params.space.rows, launch), params);
    return launch_aligned<T>(dtype, params, launch);
  });
}

}  // namespace dandan_norm
