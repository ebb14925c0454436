// Warp-group matrix multiply-accumulate with a in registers and b N contiguous (sm_90a): d[64, N] += a[64, 16] * b[16, N], b in shared memory.
//
// a as in wgmma_registers.cuh, b (rows of one k, N contiguous, 128-byte swizzle) and accumulators as in wgmma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace dandan::ptx {

#define DANDAN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DANDAN_D8(i) DANDAN_D4(i), DANDAN_D4(i + 4)
#define DANDAN_D16(i) DANDAN_D8(i), DANDAN_D8(i + 8)
#define DANDAN_D32(i) DANDAN_D16(i), DANDAN_D16(i + 16)
// The instruction of N columns: REGISTERS and ACCUMULATORS list its N / 2 accumulators, A is the list of a, B and S number the operands after them.
#define DANDAN_WGMMA_TYPE(T, TYPE, N, REGISTERS, A, B, S, ...)                                                                                \
  template <>                                                                                                                                  \
  struct WgmmaRegistersOuter<T, N> {                                                                                                           \
    static __device__ __forceinline__ void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {                       \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, " S ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE          \
                   " {" REGISTERS "}, {" A "}, " B ", p, 1, 1, 1;\n\t}"                                                                         \
                   : __VA_ARGS__                                                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<uint32_t>(accumulate)));                              \
    }                                                                                                                                          \
  };
#define DANDAN_WGMMA(...)                            \
  DANDAN_WGMMA_TYPE(__half, "f16", __VA_ARGS__)        \
  DANDAN_WGMMA_TYPE(__nv_bfloat16, "bf16", __VA_ARGS__)

// WgmmaRegistersOuter<T, N>::run: d = a * b + (accumulate ? d : 0). Of N columns there is what the kernels use.
template <typename T, int N>
struct WgmmaRegistersOuter;

DANDAN_WGMMA(64,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31",
             "%32, %33, %34, %35", "%36", "%37", DANDAN_D32(0))
DANDAN_WGMMA(128,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
             "%64, %65, %66, %67", "%68", "%69", DANDAN_D32(0), DANDAN_D32(32))
DANDAN_WGMMA(256,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
             "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
             "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
             "%120, %121, %122, %123, %124, %125, %126, %127",
             "%128, %129, %130, %131", "%132", "%133", DANDAN_D32(0), DANDAN_D32(32), DANDAN_D32(64), DANDAN_D32(96))

#undef DANDAN_WGMMA
#undef DANDAN_WGMMA_TYPE
#undef DANDAN_D32
#undef DANDAN_D16
#undef DANDAN_D8
#undef DANDAN_D4

}  // namespace dandan::ptx
