#include "sm80_mma_launch.cuh"

namespace dandan_attention {

void launch_sm80_mma_d128(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    switch (launch.config) {
      case 3: return launch_sm80_mma_shape<3, T>(params, launch);
      case 4: return launch_sm80_mma_shape<4, T>(params, launch);
      case 5: return launch_sm80_mma_shape<5, T>(params, launch);
      case 6: return launch_sm80_mma_shape<6, T>(params, launch);
      case 7: return launch_sm80_mma_shape<7, T>(params, launch);
    }
    no_configuration("sm80_mma", launch.config, 128);
  });
}

}  // namespace dandan_attention
