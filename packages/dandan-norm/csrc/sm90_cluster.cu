#include "row_launch.cuh"

namespace dandan_norm {

void launch_sm90_cluster_rms(DType dtype, const Params& params, const Launch& launch) { launch_row_rms<true>(dtype, params, launch); }

void launch_sm90_cluster_layer_norm(DType dtype, const Params& params, const Launch& launch) { launch_row_layer_norm<true>(dtype, params, launch); }

void launch_sm90_cluster_softmax(DType dtype, const Params& params, const Launch& launch) { launch_row_softmax<true>(dtype, params, launch); }

void launch_sm90_cluster_argmax(DType dtype, const Params& params, const Launch& launch) { launch_row_argmax<true>(dtype, params, launch); }

}  // namespace dandan_norm
