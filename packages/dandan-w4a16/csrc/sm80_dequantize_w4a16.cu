#include "sm80_dequantize_w4a16.cuh"

#include "launch.h"

namespace dandan_w4a16 {

void launch_sm80_dequantize(DType dtype, const Params& params, int64_t first, int64_t count, void* out, const Launch& launch) {
  if (count <= 0) return;
  DequantizeParams p = {};
  p.codes = params.codes;
  p.scales = params.scales;
  p.out = out;
  p.first = first;
  p.count = count;
  p.k = params.k;
  p.blocks_k = static_cast<int>(padded(params.k) / kBlock);
  p.pairs_k = (p.blocks_k + 1) / 2;
  p.groups_k = static_cast<int>(groups_of(params.k, params.group));
  const int64_t blocks_n = (first + count + kBlock - 1) / kBlock - first / kBlock;
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks_n * p.pairs_k));
  config.block = dim3(kDequantizeThreads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  dispatch(dtype, params.group, [&](auto element, auto group) {
    dandan::host::launch(dequantize_kernel<decltype(element), decltype(group)::value>, config, p);
  });
}

}  // namespace dandan_w4a16
