// Launching a kernel: attributes, errors. Host code without torch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace dandan::host {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // takes a launch error back, so that the next CUDA call of the process does not report it as its own
  throw std::runtime_error(std::string("RuntimeError: ") + what + ": " + cudaGetErrorString(status));
}

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  cudaStream_t stream = nullptr;
  bool dependent = false;  // programmatic stream serialization: the kernel must call griddepcontrol_wait
  int cluster = 1;         // blocks of a cluster along x
  size_t shared_bytes = 0;
};

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), const LaunchConfig& config, const Parameters&... parameters) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t launch_config = {};
  launch_config.gridDim = config.grid;
  launch_config.blockDim = config.block;
  launch_config.dynamicSmemBytes = config.shared_bytes;
  launch_config.stream = config.stream;
  launch_config.attrs = attributes;
  if (config.dependent) {
    auto& attribute = attributes[launch_config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cluster > 1) {
    auto& attribute = attributes[launch_config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(config.cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  check_cuda(cudaLaunchKernelEx(&launch_config, kernel, parameters...), "kernel launch");
}

}  // namespace dandan::host
