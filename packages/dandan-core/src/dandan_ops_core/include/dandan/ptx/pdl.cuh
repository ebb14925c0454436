// Programmatic dependent launch. Below sm_90 the hardware has no such launch, so there is nothing to wait for or to release.
#pragma once

namespace dandan::ptx {

// Waits until every grid that this one depends on has completed and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the grids that depend on this one start; their wait still covers everything this grid writes.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace dandan::ptx
