#include "sm80_mma_launch.cuh"

namespace dandan_attention {

void launch_sm80_mma_d256(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    switch (launch.config) {
      case 8: return launch_sm80_mma_shape<8, T>(params, launch);
      case 9: return launch_sm80_mma_shape<9, T>(params, launch);
      case 10: return launch_sm80_mma_shape<10, T>(params, launch);
      case 11: return launch_sm80_mma_shape<11, T>(params, launch);
    }
    no_configuration("sm80_mma", launch.config, 256);
  });
}

}  // namespace dandan_attention
