#include "sm90a_wgmma_launch.cuh"

namespace dandan_attention {

void launch_sm90a_wgmma(DType dtype, const Params& params, const Launch& launch) {
  const bool half = dtype == DType::kHalf;
  switch (params.head_dim) {
    case 64: return (half ? launch_sm90a_wgmma_d64_f16 : launch_sm90a_wgmma_d64_bf16)(dtype, params, launch);
    case 128: return (half ? launch_sm90a_wgmma_d128_f16 : launch_sm90a_wgmma_d128_bf16)(dtype, params, launch);
    case 256: return (half ? launch_sm90a_wgmma_d256_f16 : launch_sm90a_wgmma_d256_bf16)(dtype, params, launch);
  }
  no_configuration("sm90a_wgmma", launch.config, params.head_dim);
}

}  // namespace dandan_attention
