// Not built yet: no operator calls it.
#include "sm80_decode_launch.cuh"

namespace dandan_attention {

void launch_sm80_decode_d128(DType dtype, const DecodeParams& params, const DecodeLaunch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    switch (launch.config) {
      case 3: return launch_sm80_decode_shape<3, T>(params, launch);
      case 4: return launch_sm80_decode_shape<4, T>(params, launch);
      case 5: return launch_sm80_decode_shape<5, T>(params, launch);
    }
    no_configuration("sm80_decode", launch.config, 128);
  });
}

}  // namespace dandan_attention
