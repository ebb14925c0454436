#include "row_launch.cuh"

namespace dandan_norm {

void launch_sm80_row_rms(DType dtype, const Params& params, const Launch& launch) { launch_row_rms<false>(dtype, params, launch); }

void launch_sm80_row_layer_norm(DType dtype, const Params& params, const Launch& launch) { launch_row_layer_norm<false>(dtype, params, launch); }

void launch_sm80_row_softmax(DType dtype, const Params& params, const Launch& launch) { launch_row_softmax<false>(dtype, params, launch); }

void launch_sm80_row_argmax(DType dtype, const Params& params, const Launch& launch) { launch_row_argmax<false>(dtype, params, launch); }

}  // namespace dandan_norm
