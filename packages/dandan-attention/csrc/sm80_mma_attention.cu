#include "sm80_mma_launch.cuh"

namespace dandan_attention {

void launch_sm80_mma(DType dtype, const Params& params, const Launch& launch) {
  switch (params.head_dim) {
    case 64: return launch_sm80_mma_d64(dtype, params, launch);
    case 128: return launch_sm80_mma_d128(dtype, params, launch);
    case 256: return launch_sm80_mma_d256(dtype, params, launch);
  }
  no_configuration("sm80_mma", launch.config, params.head_dim);
}

}  // namespace dandan_attention
