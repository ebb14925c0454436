// Further numbers of columns of wgmma.cuh (sm_90a).
#pragma once

#include <dandan/ptx/wgmma.cuh>

namespace dandan::ptx {

#define DANDAN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DANDAN_D8(i) DANDAN_D4(i), DANDAN_D4(i + 4)
#define DANDAN_D16(i) DANDAN_D8(i), DANDAN_D8(i + 8)
#define DANDAN_D32(i) DANDAN_D16(i), DANDAN_D16(i + 16)
// As in wgmma.cuh.
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

DANDAN_WGMMA(176,
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
             "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
             "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87",
             "%88", "%89", "%90", "%91", "%92", DANDAN_D32(0), DANDAN_D32(32), DANDAN_D16(64), DANDAN_D8(80))

#undef DANDAN_WGMMA
#undef DANDAN_WGMMA_TYPE
#undef DANDAN_D32
#undef DANDAN_D16
#undef DANDAN_D8
#undef DANDAN_D4

}  // namespace dandan::ptx
