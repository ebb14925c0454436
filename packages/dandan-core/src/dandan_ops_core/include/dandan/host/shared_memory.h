// Dynamic shared memory beyond the 48 KB that every kernel may have. Host code without torch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include <dandan/host/launch.h>

namespace dandan::host {

// Lets kKernel have `bytes` of dynamic shared memory, always the same number, on the current device. The runtime is asked once for each device.
template <auto kKernel>
inline void allow_shared_memory(int bytes) {
  constexpr int kMaxDevices = 64;
  static std::atomic<uint64_t> allowed{0};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current device");
  const uint64_t bit = uint64_t{1} << (device % kMaxDevices);
  if (device < kMaxDevices && (allowed.load(std::memory_order_relaxed) & bit) != 0) return;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory of a kernel");
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace dandan::host
