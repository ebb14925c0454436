// Computes   out = softmax(logits) . v and the logarithms of the sums, see attention.h; logits and sums in fp32, P rounded to the element type.
// Tile       kTileM rows of q of one head: a consumer warp group has 64; kTileN keys at a time. As many blocks as multiprocessors, tile after tile.
// Pipeline   one warp copies k and v, one chooses tiles and copies q, kConsumers warp groups multiply. A group's instructions, k_i q and P_i v_i:
//              tensor cores, group 0   k1 v0 |       | k2 v1 |       | .. v_last k0' |         |   (k0': of the next tile of queries)
//              softmax,      group 0         |  P1 . . . .   |  P2 . . . .   |    out, P0' . . .
//              tensor cores, group 1         | k1 v0 |       | k2 v1 | ..                          (named barriers pass the turn)
//            P v of a tile of keys runs beside the softmax of the next; the next tile's first logits beside the result's way out.
// Layout     slots of shared memory, k and v in turn in the order of use, a full and an empty barrier each: panels of 64 columns, a row of 128 bytes
//            a key, 128-byte swizzle. q: as panels of 64 rows, a warp group's own. P stays in registers as the next instruction's operand.
//              | q: group 0: panel 0 | panel 1 | group 1 .. | slot 0: panel 0 (kTileN x 128 bytes) | panel 1 | slot 1 ..
// Bound      FLOPs: 4 * head_dim for every visible pair over the tensor rate (H200: 989 TF); 2^x on the special function unit: 1 a pair, 16 a clock and
//            multiprocessor, as long as the tensor cores where head_dim is 64.
// Requires   sm_90a. q, k, v, out: starts and strides at multiples of 16 bytes, rows of q, k, v not all the same (stride 0).
// Selected   routes.h: sm_90.
#pragma once

#include <cuda.h>

#include <dandan/ptx/mbarrier.cuh>
#include <dandan/ptx/named_barrier.cuh>
#include <dandan/ptx/pdl.cuh>
#include <dandan/ptx/setmaxnreg.cuh>
#include <dandan/ptx/shared.cuh>
#include <dandan/ptx/tma.cuh>
#include <dandan/ptx/wgmma.cuh>
#include <dandan/ptx/wgmma_columns.cuh>
#include <dandan/ptx/wgmma_registers_outer.cuh>
#include <dandan/tile/quad.cuh>
#include <dandan/tile/quad_reduce.cuh>
#include <dandan/tile/vector.cuh>

#include "mask.cuh"
#include "sm90a_producers.cuh"
#include "sm90a_softmax.cuh"
#include "sm90a_storage.cuh"

namespace dandan_attention {

// ---------------------------------------------------------------- the warp groups that multiply

inline constexpr int kTurnBarrier = 1;  // and the following, one a warp group: its turn to issue
inline constexpr int kGroupBarrier = 4;  // and the following: the warps of a warp group

template <class C, typename T, bool kMasked, bool kTransform>
struct Consumer {
  static constexpr int kS = C::kTileN / 2, kO = C::kHeadDim / 2, kSteps = C::kTileN / 16;

  const WgmmaParams& p;
  const Shared<C>& shared;
  int group, warp, lane;
  Ring<C::kTiles> info;  // of the tile in work
  Ring<C::kQueries> query;
  Ring<C::kSlots> ring;

  __device__ __forceinline__ const TileInfo& tile() const { return shared.control->info[info.at]; }
  __device__ __forceinline__ int row() const { return group * 64 + warp * 16 + lane / 4; }
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void take_turn() const { ptx::named_barrier_sync(kTurnBarrier + group, 256); }
  __device__ __forceinline__ void give_turn() const {
    ptx::named_barrier_arrive(kTurnBarrier + (group + 1 == C::kConsumers ? 0 : group + 1), 256);
  }

  // Waits for the next tile; false: there is none. The first of a block is at `info` already.
  __device__ __forceinline__ bool next_tile(bool advance) {
    if (advance) info.next();
    ptx::mbarrier_wait(shared.info_full(info.at), info.parity);
    return tile().end >= 0;
  }

  // s = q . k of the slot in `ring`.
  __device__ __forceinline__ void multiply_q(float (&s)[kS]) const {
    const uint64_t q = ptx::wgmma_descriptor(shared.q(query.at, group), 0, 1024), k = ptx::wgmma_descriptor(shared.slot(ring.at), 0, 1024);
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; ++step) {  // 16 columns are 32 bytes of a row; a descriptor counts in 16 bytes
      ptx::Wgmma<T, C::kTileN, false, false>::run(s, q + (step / 4 * C::kPanelQ + step % 4 * 32) / 16, k + (step / 4 * C::kPanelKv + step % 4 * 32) / 16,
                                                  step > 0);
    }
    ptx::wgmma_commit_group();
  }

  // o (+)= P . v of the slot in `ring`.
  __device__ __forceinline__ void multiply_p(float (&o)[kO], const uint32_t (&weights)[kSteps][4], bool accumulate) const {
    const uint64_t v = ptx::wgmma_descriptor(shared.slot(ring.at), C::kPanelKv, 1024);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {  // 16 keys are 16 rows of 128 bytes
      ptx::WgmmaRegistersOuter<T, C::kHeadDim>::run(o, weights[step], v + step * 128, accumulate || step > 0);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void pack(uint32_t (&weights)[kSteps][4], const float (&s)[kS]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[step][i] = tile::pack_pair(s[8 * step + 2 * i], s[8 * step + 2 * i + 1], T{});
    }
  }

  // The tile of keys in work, of a tile of queries.
  struct Keys {
    int n, begin, full_begin, full_end;
    __device__ __forceinline__ bool masked() const { return (kMasked && n < full_begin) || n >= full_end; }
  };
  __device__ __forceinline__ Keys first_keys() const {
    const TileInfo& t = tile();
    return {t.end - 1, t.begin, t.full_begin, t.full_end};
  }

  // Logits of keys that this thread's rows do not see become `value`. Returns, a bit a row, which rows see a key of tile n at all.
  __device__ __forceinline__ uint32_t hide(float (&s)[kS], int n, float value) const {
    const TileInfo& t = tile();
    const Sequence q = {t.first_q, t.first_k, t.length_q, t.live, t.start};
    const KeyRange low = visible_keys(p.sequences, q, t.row0 + row()), high = visible_keys(p.sequences, q, t.row0 + row() + 8);
    const int begin[2] = {low.begin, high.begin}, end[2] = {low.end, high.end}, first = n * C::kTileN;
    mask(s, first + lane % 4 * 2, begin, end, kMasked && p.sequences.window > 0, value);
    const auto sees = [&](int h) { return begin[h] < min(end[h], first + C::kTileN) && end[h] > first; };
    return sees(0) | sees(1) * 2u;
  }

  // Products become P; returns what refer does.
  __device__ __forceinline__ bool weigh(float (&s)[kS], const Keys& keys, OnlineSoftmax& softmax, float exponent, float (&factor)[2]) const {
    const bool masked = keys.masked();
    if constexpr (!kTransform) {
      if (masked) hide(s, keys.n, -INFINITY);
      return softmax.next(s, exponent, p.slack, factor);
    } else {
      const Transform& transform = p.transform;
      if (transform.scales) transform.scale(s);
      uint32_t sees = 3;
      if (masked) sees = hide(s, keys.n, -INFINITY);
      float m[2];
      OnlineSoftmax::largest(s, m);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float logit = transform.softcap ? transform.of(m[h], 0.f) : m[h];
        m[h] = (sees >> h & 1) != 0 ? logit : -INFINITY;
      }
      const bool grows = softmax.refer(m, 1.f, p.slack, factor);
      float shifts[2] = {softmax.shift(0, 1.f), softmax.shift(1, 1.f)};
      if (masked) hide(s, keys.n, 0.f);  // what lies beyond the keys must not choose the way of the transform
      const bool near = transform.all_near(s);
      const auto near_of = [&](float x, int h) { return fmaf(x, transform.factor_near(x), -shifts[h]); };
      if (near && !masked) {
        softmax.exponentials(s, near_of);
        return grows;
      }
      // Not to be computed together with what is above, whose exponentials run beside the polynomial.
      asm volatile("" : "+f"(shifts[0]), "+f"(shifts[1]));
      if (near) {
#pragma unroll
        for (int i = 0; i < kS; ++i) s[i] = near_of(s[i], i / 2 % 2);
      } else if (transform.softcap) {
#pragma unroll
        for (int i = 0; i < kS; ++i) s[i] = transform.of(s[i], shifts[i / 2 % 2]);
      } else {
#pragma unroll
        for (int i = 0; i < kS; ++i) s[i] -= shifts[i / 2 % 2];
      }
      if (masked) hide(s, keys.n, -INFINITY);
      softmax.exponentials(s, [](float x, int) { return x; });
      return grows;
    }
  }

  // The products with keys of `slot` are there.
  __device__ __forceinline__ void release_keys(int slot, const Keys& keys) const {
    arrive(shared.empty(slot));
    if (keys.n == keys.begin) arrive(shared.q_empty(query.at, group));
  }

  // How many rows of v in the tile in work hold values that count, where others may hold anything; else kTileN.
  __device__ __forceinline__ int rows_of_v(const Keys& keys) const { return p.clear_tail ? tile().live - keys.n * C::kTileN : C::kTileN; }

  // Zeros for the others, in the slot in `ring`: 0 * NaN is NaN. Every warp group writes its own, before it reads.
  __device__ __forceinline__ void clear_tail(int rows) const {
    for (int i = rows * 8 + warp * 32 + lane; i < C::kTileN * 8; i += 128) {
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::st_shared_v4(shared.slot(ring.at) + panel * C::kPanelKv + i * 16, make_uint4(0, 0, 0, 0));
      }
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kGroupBarrier + group, 128);
  }

  __device__ __forceinline__ void write_out(const TileInfo& t, const float (&o)[kO], const OnlineSoftmax& softmax, float exponent) const {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = tile::quad_sum(softmax.sum[h]);
      inverse[h] = sum == 0.f ? 0.f : 1.f / sum;
      const int r = row() + 8 * h;
      if (p.lse != nullptr && lane % 4 == 0 && t.row0 + r < t.length_q) {
        *lse_row(p, t, r) = sum == 0.f ? -INFINITY : softmax.reference[h] * exponent * 0.69314718055994531f + logf(sum);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row() + 8 * h;
      T* const to = out_row<T>(p, t, r) + lane % 4 * 8;
      const bool inside = t.row0 + r < t.length_q;
#pragma unroll
      for (int i = 0; i < C::kHeadDim / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const d = &o[16 * i + 4 * j + 2 * h];
          words[j] = inverse[h] == 0.f ? 0u : tile::pack_pair(d[0] * inverse[h], d[1] * inverse[h], T{});  // no key: 0, whatever v holds
        }
        tile::transpose_quad_words(words);
        if (inside) *reinterpret_cast<uint4*>(to + i * 32) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const float exponent = kTransform ? 1.f : p.exponent;
    float s[kS], o[kO];
    uint32_t weights[kSteps][4];
    if (group == C::kConsumers - 1) give_turn();  // to group 0, which begins
    if (next_tile(false)) {
      OnlineSoftmax softmax;
      softmax.reset();
      float factor[2];
      Keys keys = first_keys();
      bool begins = true;  // the keys in work are their tile's first
      ptx::mbarrier_wait(shared.q_full(query.at, group), query.parity);
      ptx::mbarrier_wait(shared.full(ring.at), ring.parity);
      ptx::wgmma_fence_registers(s);
      ptx::wgmma_fence();
      multiply_q(s);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_fence_registers(s);
      release_keys(ring.at, keys);
      ring.next();
      weigh(s, keys, softmax, exponent, factor);
      pack(weights, s);
      int rows = rows_of_v(keys), done;
      bool accumulate;

      while (true) {  // `weights` waits for its v; s is asked for and becomes the next weights, of this tile of queries or of the next
        accumulate = !begins;
        done = info.at;
        begins = keys.n == keys.begin;
        if (begins) {
          if (!next_tile(true)) break;
          query.next();
          keys = first_keys();
          ptx::mbarrier_wait(shared.q_full(query.at, group), query.parity);
        } else {
          --keys.n;
        }
        const int k_slot = ring.at;
        ptx::mbarrier_wait(shared.full(ring.at), ring.parity);
        take_turn();
        ptx::wgmma_fence_registers(s);
        ptx::wgmma_fence_registers(o);
        ptx::wgmma_fence();
        multiply_q(s);
        ring.next();
        ptx::mbarrier_wait(shared.full(ring.at), ring.parity);
        if (rows < C::kTileN) clear_tail(rows);
        ptx::wgmma_fence();
        multiply_p(o, weights, accumulate);
        give_turn();
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_fence_registers(s);
        release_keys(k_slot, keys);
        const OnlineSoftmax before = softmax;
        if (begins) softmax.reset();
        const bool rescale = weigh(s, keys, softmax, exponent, factor);
        // A wait in each branch: one before them would be moved before the exponentials, which shall run beside the product.
        if (begins) {
          ptx::wgmma_wait_group<0>();
          ptx::wgmma_fence_registers(o);
          ptx::wgmma_fence_registers(s);
          arrive(shared.empty(ring.at));
          write_out(shared.control->info[done], o, before, exponent);
          arrive(shared.info_empty(done));
          rows = rows_of_v(keys);
        } else {
          ptx::wgmma_wait_group<0>();
          ptx::wgmma_fence_registers(o);
          ptx::wgmma_fence_registers(s);
          arrive(shared.empty(ring.at));
          if (__any_sync(0xffffffffu, rescale)) {
#pragma unroll
            for (int i = 0; i < kO; ++i) o[i] *= factor[i / 2 % 2];
          }
          rows = C::kTileN;
        }
        ring.next();
        pack(weights, s);
      }

      ptx::mbarrier_wait(shared.full(ring.at), ring.parity);
      if (rows < C::kTileN) clear_tail(rows);
      take_turn();
      ptx::wgmma_fence_registers(o);
      ptx::wgmma_fence();
      multiply_p(o, weights, accumulate);
      give_turn();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_fence_registers(o);
      write_out(shared.control->info[done], o, softmax, exponent);
    }
    if (group == 0) take_turn();  // the last group gave one more
  }
};

template <class C, typename T, bool kMasked, bool kTransform>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma_attention_kernel(const __grid_constant__ WgmmaParams p) {
  extern __shared__ unsigned char raw[];
  const Shared<C> shared(raw);
  // Taken from one lane: so the compiler knows that a warp's addresses and descriptors are the same in all of its lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.q);
    ptx::prefetch_tensormap(&p.k);
    ptx::prefetch_tensormap(&p.v);
    for (int i = 0; i < C::kSlots; ++i) {
      ptx::mbarrier_init(shared.full(i), 1);
      ptx::mbarrier_init(shared.empty(i), C::kConsumers * 4);
    }
    for (int buffer = 0; buffer < C::kQueries; ++buffer) {
      for (int group = 0; group < C::kConsumers; ++group) {
        ptx::mbarrier_init(shared.q_full(buffer, group), 1);
        ptx::mbarrier_init(shared.q_empty(buffer, group), 4);
      }
    }
    for (int i = 0; i < C::kTiles; ++i) {
      ptx::mbarrier_init(shared.info_full(i), 1);
      ptx::mbarrier_init(shared.info_empty(i), C::kConsumers * 4 + 1);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  if (p.sequences.cu_seqlens_q != nullptr) {
    // Nothing else uses the first slot yet.
    auto* const scratch = reinterpret_cast<SequenceTable::Scratch*>(raw + (shared.slot(0) - ptx::shared_address(raw)));
    shared.control->table.template build_sorted<C::kTileM, C::kTileN, C::kThreads>(p.sequences, p.schedule, scratch);
    ptx::fence_proxy_async();
  }
  __syncthreads();  // the barriers are set up

  if (warp >= C::kConsumers * 4) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (warp == C::kConsumers * 4 + 1) {
      choose_tiles<C>(p, shared, lane);
    } else if (warp == C::kConsumers * 4 && lane == 0) {
      copy_keys<C>(p, shared);
      ptx::griddepcontrol_launch_dependents();
    }
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    Consumer<C, T, kMasked, kTransform> consumer{p, shared, warp / 4, warp % 4, lane};
    consumer.run();
  }
}

}  // namespace dandan_attention
