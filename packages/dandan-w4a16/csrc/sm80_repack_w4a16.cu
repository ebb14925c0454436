#include "sm80_repack_w4a16.cuh"

#include "launch.h"

namespace dandan_w4a16 {
namespace {

RepackParams make_params(const Weight& weight) {
  RepackParams p = {};
  p.weight = weight;
  p.blocks_k = padded(weight.k) / kBlock;
  p.groups = (weight.k + weight.group - 1) / weight.group;
  p.groups_k = groups_of(weight.k, weight.group);
  return p;
}

void launch_words(void (*kernel)(RepackParams), RepackParams p, int64_t codes, int64_t scales, cudaStream_t stream) {
  p.code_threads = codes;
  p.threads = codes + scales;
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((p.threads + 255) / 256));
  config.block = dim3(256);
  config.stream = stream;
  if (p.threads > 0) dandan::host::launch(kernel, config, p);
}

}  // namespace

void launch_sm80_repack(DType dtype, const Weight& weight, cudaStream_t stream) {
  const auto kernel = dtype == DType::kHalf ? repack_kernel<__half> : repack_kernel<__nv_bfloat16>;
  launch_words(kernel, make_params(weight), code_words(weight.n, weight.k), scale_words(weight.n, weight.k, weight.group), stream);
}

void launch_sm80_unpack(DType dtype, const Weight& weight, cudaStream_t stream) {
  const RepackParams p = make_params(weight);
  const auto kernel = dtype == DType::kHalf ? unpack_kernel<__half> : unpack_kernel<__nv_bfloat16>;
  launch_words(kernel, p, weight.n * (weight.k / 8), weight.n * p.groups, stream);
}

}  // namespace dandan_w4a16
