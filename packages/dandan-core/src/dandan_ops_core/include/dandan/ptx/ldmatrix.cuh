// 8x8 matrices of 16-bit elements from shared memory to the registers of a warp (sm_75). Addresses are 32-bit shared addresses.
#pragma once

#include <cstdint>

namespace dandan::ptx {

// Four matrices; lane l gives the address of row l % 8 of matrix l / 8 and gets, of each, the elements 2 * (l % 4) and + 1 of row l / 4.
__device__ __forceinline__ void ldmatrix_x4(uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3)
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: the elements 2 * (l % 4) and + 1 of column l / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3)
               : "r"(address)
               : "memory");
}

}  // namespace dandan::ptx
