// Not built yet: no operator calls it.
#include "sm80_decode_launch.cuh"

namespace dandan_attention {

int64_t decode_workspace_bytes(const DecodeParams& params, const DecodeLaunch& launch) {
  if (params.batch == 0 || params.seqlen_q == 0 || params.num_heads_q == 0) return 0;
  const DecodeShape& shape = kSm80DecodeShapes[launch.config];
  return DecodeGrid(params, launch, shape).part_rows(shape) * (shape.head_dim + 1) * 4;
}

void launch_sm80_decode(DType dtype, const DecodeParams& params, const DecodeLaunch& launch) {
  switch (params.head_dim) {
    case 64: return launch_sm80_decode_d64(dtype, params, launch);
    case 128: return launch_sm80_decode_d128(dtype, params, launch);
    case 256: return launch_sm80_decode_d256(dtype, params, launch);
  }
  no_configuration("sm80_decode", launch.config, params.head_dim);
}

}  // namespace dandan_attention
