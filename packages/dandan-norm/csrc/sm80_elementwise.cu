#include "sm80_elementwise.cuh"

#include "launch.h"

namespace dandan_norm {
namespace {

template <typename T, int kUnits>
void launch_aligned(DType dtype, const Params& params, const Launch& launch) {
  GluParams p = {aligned_rows(dtype, params, params.x), aligned_rows(dtype, params, params.other), aligned_rows(dtype, params, params.out),
                 aligned_space(dtype, params)};
  auto config = row_config(params.space.rows, launch);
  const int chunk = launch.tile.threads * kUnits;
  config.grid.y = static_cast<unsigned>((p.space.vectors + chunk - 1) / chunk);
  dandan::host::launch(sm80_elementwise_kernel<T, kUnits>, config, p);
}

}  // namespace

void launch_sm80_elementwise(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    if (!launch.vectorized) return dandan::host::launch(sm80_elementwise_any_kernel<T>, row_config(params.space.rows, launch), params);
    if (launch.tile.vectors == 2) return launch_aligned<T, 2>(dtype, params, launch);
    return launch_aligned<T, 1>(dtype, params, launch);
  });
}

}  // namespace dandan_norm
