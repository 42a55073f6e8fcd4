// One thread's part of what a warp group of attention_backward.cuh makes of its 64 keys and of 64 queries at a time.
#pragma once

#include "attention_backward_task.cuh"
#include "attention_bias.cuh"

namespace te_compile::attention {

/// Numbers of a step's queries, or words of bits, of which a thread needs two side by side of each eight: read from shared
/// memory all at once, or where there are no registers to hold them, as they are needed.
template <typename X, bool AtOnce>
struct OfQueries {
  static_assert(sizeof(X) == 4);
  uint32_t from;
  X held[AtOnce ? kStep / 4 : 2];

  __device__ __forceinline__ void read(int j, X* to) {
    uint32_t x, y;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(from + 32 * j));
    memcpy(to, &x, 4);
    memcpy(to + 1, &y, 4);
  }
  __device__ __forceinline__ explicit OfQueries(uint32_t at) : from(at) {
#pragma unroll
    for (int j = 0; AtOnce && j < kStep / 8; ++j) read(j, held + 2 * j);
  }
  __device__ __forceinline__ const X* of(int j) {
    if (AtOnce) return held + 2 * j;
    read(j, held);
    return held;
  }
};

/// One thread's part of 64 keys, of which it has rows `row` and `row` + 8.
template <typename T, int Width, Sight Seen, bool Drops>
struct Keys {
  static constexpr bool kAtOnce = BackwardSizes<Width>::kRoomy;
  using Numbers = OfQueries<float, kAtOnce>;
  using Words = OfQueries<uint32_t, kAtOnce && Drops>;
  float dk[Width / 2], dv[Width / 2], scores[kStep / 2], dp[kStep / 2], dq[Width / 4];
  uint32_t weights[kStep / 4];
  int group, thread, lane;
  uint32_t bit, next_bit;  // of this thread's keys, in the words of a query

  /// Returns the first of this thread's rows.
  __device__ __forceinline__ int begin(int this_group) {
    group = this_group;
    thread = threadIdx.x % 128;
    lane = threadIdx.x % 32;
    const int row = thread / 32 * 16 + lane / 4;
    bit = 1u << (16 * (row / 2 % 2) + 8 * (row % 2) + row / 8);
    next_bit = bit << 1;
    return row;
  }

  /// Products of this group's keys or values, rows of `mine`, with rows of queries.
  __device__ __forceinline__ void ask_for(float (&d)[kStep / 2], uint32_t mine, uint32_t queries) {
    const uint32_t a = matrix<16>(anew(mine)), b = matrix<16>(queries);
#pragma unroll
    for (int k = 0; k < Width / 16; ++k) {
      product<0, 0>(d, part(a, (k / 4) * kBlock + (k % 4) * 32), part(b, (k / 4) * kStepBlock + (k % 4) * 32), k > 0,
                    static_cast<const T*>(nullptr));
    }
    products_end();
  }

  __device__ __forceinline__ void ask_for_dv(uint32_t grad, bool more) {
    const uint32_t b = matrix<kStepBlock>(grad);
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      product(dv, weights + 4 * k, part(b, k * 2048), more || k > 0, static_cast<const T*>(nullptr));
    }
    products_end();
  }

  __device__ __forceinline__ void ask_for_dk(uint32_t ds, uint32_t queries, bool more) {
    const uint32_t a = matrix<16>(ds + group * 64 * 128), b = matrix<kStepBlock>(queries);
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      product<0, 1>(dk, part(a, k * 32), part(b, k * 2048), more || k > 0, static_cast<const T*>(nullptr));
    }
    products_end();
  }

  __device__ __forceinline__ void ask_for_dq(uint32_t ds, uint32_t keys) {
    const uint32_t a = matrix<16>(ds), b = matrix<16>(anew(keys) + (Width > 64 ? group * kBlock : group * 64));
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      product<1, 1>(dq, part(a, k * 2048), part(b, k * 2048), k > 0, static_cast<const T*>(nullptr));
    }
    products_end();
  }

  /// Scores become weights, by the sums of their queries.
  __device__ __forceinline__ void weigh(Numbers& sums, float scale) {
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
      const float* sum = sums.of(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores[4 * j + i];
        x = exp2_fast(fmaf(x, scale, -sum[i % 2]));
      }
    }
  }

  /// The same with what a bias adds, of which `step` has 64 columns for each group's keys.
  __device__ __forceinline__ void weigh(Numbers& sums, float scale, uint32_t step) {
    const uint32_t row = lane / 16 * 8 + lane % 8, column = thread / 32 * 2 + lane / 8 % 2;
    const uint32_t from = step + group * kStepBlock + row * 128 + (column ^ lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < kStep / 8; j += 2) {
      uint32_t two[4];  // of queries 8 j and 8 j + 8, of both keys
      load_transposes(two, from + j * 1024);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* sum = sums.of(j + i / 2);
        const float2 added = both(two[i], static_cast<const T*>(nullptr));
        float* const x = scores + 4 * j + 2 * i;
        x[0] = exp2_fast(fmaf(x[0], scale, fmaf(added.x, kLog2E, -sum[0])));
        x[1] = exp2_fast(fmaf(x[1], scale, fmaf(added.y, kLog2E, -sum[1])));
      }
    }
  }

  /// No weights for keys that their query does not see, or that are not there.
  __device__ __forceinline__ void mask(const Backward& task, int first_key, int first_query) {
    const int key = first_key + group * 64 + thread / 32 * 16 + lane / 4, query = first_query + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      const int this_key = key + 8 * (i % 4 / 2), this_query = query + 8 * (i / 4) + i % 2;
      const bool hidden = Seen == Sight::kCausal ? this_key > this_query
                                                 : Seen == Sight::kWindow && task.window.hides(this_key, this_query);
      if (hidden || this_key >= task.keys) scores[i] = 0;
    }
  }

  /// No weights for what the mask does not show; rows: its words of this thread's two keys.
  __device__ __forceinline__ void mask_shown(const uint2 (&rows)[2]) {
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      const uint32_t word = i < 16 ? rows[i % 4 / 2].x : rows[i % 4 / 2].y;
      if (((word >> (2 * (lane % 4))) & (1u << (8 * (i / 4 % 4) + i % 2))) == 0) scores[i] = 0;
    }
  }

  /// Rounds the weights that are kept, and zeros for the others. Returns what is known once all are, and not negative.
  __device__ __forceinline__ int round(Words& words) {
    uint32_t all = 0;
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
      const uint32_t* word = Drops ? words.of(j) : nullptr;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t kept = h ? next_bit : bit;
        const float a = !Drops || word[0] & kept ? scores[4 * j + 2 * h] : 0.f;
        const float b = !Drops || word[1] & kept ? scores[4 * j + 2 * h + 1] : 0.f;
        weights[2 * j + h] = pair(a, b, static_cast<const T*>(nullptr));
        all |= weights[2 * j + h];
      }
    }
    return static_cast<int>(all);
  }

  /// ds = p (z dp - shift), rounded, to shared memory, a row for each key.
  __device__ __forceinline__ void write_ds(uint32_t ds, Numbers& shifts, Words& words, float growth) {
    uint32_t both[kStep / 4];
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
      float x[4];
      const float* shift = shifts.of(j);
      const uint32_t* word = Drops ? words.of(j) : nullptr;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (Drops) {
          const float kept = fmaf(dp[4 * j + i], growth, -shift[i % 2]);
          x[i] = scores[4 * j + i] * (word[i % 2] & (i / 2 ? next_bit : bit) ? kept : -shift[i % 2]);
        } else {
          x[i] = scores[4 * j + i] * (dp[4 * j + i] - shift[i % 2]);
        }
      }
      both[2 * j] = pair(x[0], x[1], static_cast<const T*>(nullptr));
      both[2 * j + 1] = pair(x[2], x[3], static_cast<const T*>(nullptr));
    }
    const uint32_t row = ds + (group * 64 + thread / 32 * 16 + lane % 16) * 128;
#pragma unroll
    for (int j = 0; j < kStep / 8; j += 2) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       row + ((j + lane / 16) ^ (lane % 8)) * 16),
                   "r"(both[2 * j]), "r"(both[2 * j + 1]), "r"(both[2 * j + 2]), "r"(both[2 * j + 3])
                   : "memory");
    }
  }

  /// To shared memory, from where it is added to memory's; what was there before has been read.
  __device__ __forceinline__ void stage_dq(uint32_t staged) {
#pragma unroll
    for (int i = 0; i < Width / 16; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(staged + thread * 16 + i * 2048), "f"(dq[4 * i]),
                   "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                   : "memory");
    }
  }

  /// This group's columns of a dq that is whole; count: how many of the queries are there.
  __device__ __forceinline__ void write_dq(char* place, int64_t row, int count, float factor, int width) {
    T* const to = reinterpret_cast<T*>(place);
    const int query = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < Width / 16; ++i) {
        const int column = group * Width / 2 + 8 * i;
        if (query + 8 * h < count && column < width) {
          *reinterpret_cast<uint32_t*>(to + (query + 8 * h) * row + column + 2 * (lane % 4)) =
              pair(dq[4 * i + 2 * h] * factor, dq[4 * i + 2 * h + 1] * factor, static_cast<const T*>(nullptr));
        }
      }
    }
  }

  __device__ __forceinline__ void write(T* to, const float (&sums)[Width / 2], int h, float factor, int width) {
#pragma unroll
    for (int j = 0; j < Width / 8; ++j) {
      if (8 * j < width) {
        *reinterpret_cast<uint32_t*>(to + 8 * j + 2 * (lane % 4)) =
            pair(sums[4 * j + 2 * h] * factor, sums[4 * j + 2 * h + 1] * factor, static_cast<const T*>(nullptr));
      }
    }
  }
};

}  // namespace te_compile::attention
