// Not built yet: no operator calls it.
#include "sm80_decode_launch.cuh"

namespace dandan_attention {

void launch_sm80_decode_d64(DType dtype, const DecodeParams& params, const DecodeLaunch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    switch (launch.config) {
      case 0: return launch_sm80_decode_shape<0, T>(params, launch);
      case 1: return launch_sm80_decode_shape<1, T>(params, launch);
      case 2: return launch_sm80_decode_shape<2, T>(params, launch);
    }
    no_configuration("sm80_decode", launch.config, 64);
  });
}

}  // namespace dandan_attention
