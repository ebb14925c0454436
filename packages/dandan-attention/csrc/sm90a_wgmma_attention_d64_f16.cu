#include "sm90a_wgmma_launch.cuh"

namespace dandan_attention {

void launch_sm90a_wgmma_d64_f16(DType dtype, const Params& params, const Launch& launch) { launch_sm90a_wgmma_of<64, __half>(dtype, params, launch); }

}  // namespace dandan_attention
