// Not built yet: no operator calls it.
#include "sm80_decode_launch.cuh"

namespace dandan_attention {

void launch_sm80_decode_d256(DType dtype, const DecodeParams& params, const DecodeLaunch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    switch (launch.config) {
      case 6: return launch_sm80_decode_shape<6, T>(params, launch);
      case 7: return launch_sm80_decode_shape<7, T>(params, launch);
    }
    no_configuration("sm80_decode", launch.config, 256);
  });
}

}  // namespace dandan_attention
