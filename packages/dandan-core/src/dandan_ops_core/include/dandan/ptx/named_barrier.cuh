// Barriers of a block by number (sm_70); number 0 is __syncthreads. `threads` counts all that take part and is a multiple of 32.
#pragma once

namespace dandan::ptx {

// Arrives and waits for the others.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

}  // namespace dandan::ptx
