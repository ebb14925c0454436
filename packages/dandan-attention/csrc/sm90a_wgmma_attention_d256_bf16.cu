#include "sm90a_wgmma_launch.cuh"

namespace dandan_attention {

void launch_sm90a_wgmma_d256_bf16(DType dtype, const Params& params, const Launch& launch) { launch_sm90a_wgmma_of<256, __nv_bfloat16>(dtype, params, launch); }

}  // namespace dandan_attention
