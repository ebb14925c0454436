// Warp-group matrix multiply-accumulate (sm_90a): d[64, N] += a[64, 16] * b[16, N] by the 128 threads of a warp group, a and b in shared memory.
//
// Accumulators of thread t: d[4j + 2h + e] is row 16 * (t / 32) + (t % 32) / 4 + 8h, column 8j + 2 * (t % 4) + e.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace dandan::ptx {

// Orders register and shared-memory writes before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kGroups committed groups are still running.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving accumulators across a wait.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Descriptor of an operand in shared memory with the 128-byte swizzle. K contiguous: rows of 64 elements, `stride` bytes between groups of 8 rows
// (1024), `leading` unused. M or N contiguous: rows (of one k) of 64 elements, `stride` bytes between groups of 8 k, `leading` bytes between groups
// of 64 elements.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) | (static_cast<uint64_t>(stride >> 4) << 32) |
         (uint64_t{1} << 62);
}

// Wgmma<T, N, ..>::run: d = a * b + (accumulate ? d : 0). Not finished before a wait_group; the accumulators may not be touched until then. Of N
// columns there is what the kernels use.
#define DANDAN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DANDAN_D8(i) DANDAN_D4(i), DANDAN_D4(i + 4)
#define DANDAN_D16(i) DANDAN_D8(i), DANDAN_D8(i + 8)
#define DANDAN_D32(i) DANDAN_D16(i), DANDAN_D16(i + 16)
// The instruction of N columns: REGISTERS and ACCUMULATORS list its N / 2 accumulators, A to TB number the operands after them.
#define DANDAN_WGMMA_TYPE(T, TYPE, N, REGISTERS, A, B, S, TA, TB, ...)                                                                        \
  template <bool kAOuterContiguous, bool kBOuterContiguous>                                                                                    \
  struct Wgmma<T, N, kAOuterContiguous, kBOuterContiguous> {                                                                                   \
    static __device__ __forceinline__ void run(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {                                   \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, " S ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE          \
                   " {" REGISTERS "}, " A ", " B ", p, 1, 1, " TA ", " TB ";\n\t}"                                                             \
                   : __VA_ARGS__                                                                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)), "n"(kAOuterContiguous), "n"(kBOuterContiguous));                  \
    }                                                                                                                                          \
  };
#define DANDAN_WGMMA(...)                            \
  DANDAN_WGMMA_TYPE(__half, "f16", __VA_ARGS__)        \
  DANDAN_WGMMA_TYPE(__nv_bfloat16, "bf16", __VA_ARGS__)

template <typename T, int N, bool kAOuterContiguous, bool kBOuterContiguous>
struct Wgmma;

DANDAN_WGMMA(8,
             "%0, %1, %2, %3",
             "%4", "%5", "%6", "%7", "%8", DANDAN_D4(0))
DANDAN_WGMMA(16,
             "%0, %1, %2, %3, %4, %5, %6, %7",
             "%8", "%9", "%10", "%11", "%12", DANDAN_D8(0))
DANDAN_WGMMA(32,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
             "%16", "%17", "%18", "%19", "%20", DANDAN_D16(0))
DANDAN_WGMMA(40,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19",
             "%20", "%21", "%22", "%23", "%24", DANDAN_D16(0), DANDAN_D4(16))
DANDAN_WGMMA(48,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23",
             "%24", "%25", "%26", "%27", "%28", DANDAN_D16(0), DANDAN_D8(16))
DANDAN_WGMMA(64,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31",
             "%32", "%33", "%34", "%35", "%36", DANDAN_D32(0))
DANDAN_WGMMA(80,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39",
             "%40", "%41", "%42", "%43", "%44", DANDAN_D32(0), DANDAN_D8(32))
DANDAN_WGMMA(96,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
             "%48", "%49", "%50", "%51", "%52", DANDAN_D32(0), DANDAN_D16(32))
DANDAN_WGMMA(128,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
             "%64", "%65", "%66", "%67", "%68", DANDAN_D32(0), DANDAN_D32(32))
DANDAN_WGMMA(160,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
             "%72, %73, %74, %75, %76, %77, %78, %79",
             "%80", "%81", "%82", "%83", "%84", DANDAN_D32(0), DANDAN_D32(32), DANDAN_D16(64))
DANDAN_WGMMA(192,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
             "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95",
             "%96", "%97", "%98", "%99", "%100", DANDAN_D32(0), DANDAN_D32(32), DANDAN_D32(64))
DANDAN_WGMMA(200,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
             "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
             "%96, %97, %98, %99",
             "%100", "%101", "%102", "%103", "%104", DANDAN_D32(0), DANDAN_D32(32), DANDAN_D32(64), DANDAN_D4(96))
DANDAN_WGMMA(256,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
             "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
             "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
             "%120, %121, %122, %123, %124, %125, %126, %127",
             "%128", "%129", "%130", "%131", "%132", DANDAN_D32(0), DANDAN_D32(32), DANDAN_D32(64), DANDAN_D32(96))

#undef DANDAN_WGMMA
#undef DANDAN_WGMMA_TYPE
#undef DANDAN_D32
#undef DANDAN_D16
#undef DANDAN_D8
#undef DANDAN_D4

}  // namespace dandan::ptx
