// The kernel of te_cuda_norm_quantize: a row norm and the FP8 codes of its result, reading x once.
//
// Bytes, for x [M, K] of two-byte elements: 2 M K in, M K out for q and M K for qt; 2 M K more for y. An H200 copies
// 4.25 TB/s, which allows 32 us for 8192 x 4096 and 126 us for 8192 x 16384. This takes 45 and 160 us for an RMS norm,
// 45 and 164 us for a layer norm. What is left out of the RMS norm of 8192 x 4096 says why:
//
//     all of it                                  45 us
//     no sums, or sums by the tensor cores       45      the second half of each turn is what takes long
//     qt written as one run                      40      its runs are 32 bytes, each in a line of the L2 that others fill
//     no stores                                  33      and with no sums either 28
//     copies in alone                            20
//
// And clusters of four leave 12 of 132 multiprocessors without work, those of sixteen 20: GPCs hold no multiple of them.
//
// A row must be known whole before its first code is written, and a run of qt wants 32 rows, one memory sector:
// together too much for a block. So a cluster of blocks shares 32 rows, each block holding its part of the columns in
// shared memory, and works its way through the matrix, 32 rows a turn. In a turn each warp of a block
//
//   1. reduces two rows to a mean and a sum of squares about that mean, and sends both to every block of the cluster
//      (a block that has whole rows keeps them);
//   2. once all parts of a turn have come merges them, a row a lane;
//   3. normalises, casts and stores: a thread has four neighbouring columns of 16 rows, so that a run of qt is 16 bytes
//      from each of two threads, and q is written in runs of 64 bytes.
//
// Memory must never wait for any of this, so nothing here stops a block, let alone a cluster: a warp of its own keeps
// bulk copies of rows coming into three stages of shared memory; step 1 of the next turn comes before step 3 of this
// one and hides the way to the other blocks; and the parts are sent as stores that a barrier in the receiver's memory
// counts. What was slower: a block for each 32 rows, whose three on an SM marched in step, all loading and then all
// casting; turns divided by the cluster's own barrier, whose release waits until every store before it has landed;
// reducing and casting by warps of different kinds; two smaller blocks on an SM; a mean first and then the squares;
// copies that begin before the blocks of a cluster have met.
#pragma once

#include "norm_elements.cuh"

namespace te_compile {
namespace {

constexpr int kRows = 32;       // of a cluster
constexpr int kColumns = 1024;  // of a block, at most
constexpr int kWarps = 16;
constexpr int kStages = 3;
constexpr int kThreads = (kWarps + 1) * 32;  // one warp loads
constexpr int kWide = 4;           // neighbouring columns that a thread casts
constexpr int kStep = 16 * kWide;  // columns that a warp casts
constexpr int kLargestCluster = 16;  // what data-centre Hopper and Blackwell grant on request

/// What one block knows of one row: the mean of its columns (0 unless centred) and their squares about that mean.
struct Part {
  float mean;
  float squares;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr int kRowsOfWarp = kRows / kWarps;
constexpr int kHalf = kRows / 2;  // rows of a thread in step 3

template <typename T>
struct alignas(8) Four {
  typename Pair<T>::Type pairs[2];
};

/// The sum (if Centre) and the sum of squares of a row of this block's columns, `row` in shared memory, less `shift`.
template <typename T, bool Centre>
__device__ float2 sums_of(const uint8_t* row, int width, float shift) {
  using P = Pair<T>;
  constexpr int kLoads = kColumns / 32 / kVector;
  const int lane = threadIdx.x % 32;
  float total = 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = (i * 32 + lane) * kVector;
    if (column < width) {
      alignas(16) typename P::Type pairs[kVector / 2];
      *reinterpret_cast<uint4*>(pairs) = *reinterpret_cast<const uint4*>(row + column * sizeof(T));
#pragma unroll
      for (int j = 0; j < kVector / 2; ++j) {
        float2 x = P::floats(pairs[j]);
        if (shift != 0.0f) {
          x.x -= shift;
          x.y -= shift;
        }
        if (Centre) total += x.x + x.y;
        squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
      }
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (Centre) total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
    squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
  }
  return make_float2(total, squares);
}

/// What this block knows of a row. Sums about 0 lose the variance of large numbers that differ little, so where they
/// would lose more than a factor of 64 the row is summed again, about its mean.
template <typename T, bool Centre>
__device__ Part part_of(const uint8_t* row, int width) {
  constexpr float kMostLost = 64.0f;
  const float2 sums = sums_of<T, Centre>(row, width, 0.0f);
  if (!Centre) return {0.0f, sums.y};
  const float mean = sums.x / width;
  const float squares = sums.y - mean * sums.x;
  if (squares * kMostLost >= sums.y) return {mean, squares};
  const float2 apart = sums_of<T, Centre>(row, width, mean);
  return {mean + apart.x / width, apart.y - apart.x / width * apart.x};
}

/// mean and rstd of a row from the parts of all blocks.
template <bool Centre>
__device__ float2 merged(const Part* parts, const Task& task) {
  const float shift = Centre ? parts[0].mean : 0.0f;
  float total = 0.0f;
  float squares = 0.0f;
  for (int block = 0; block < task.blocks_of_cluster; ++block) {
    const Part part = parts[block * kRows];
    squares += part.squares;
    if (Centre) {
      const float count = min(task.columns - block * task.columns_of_block, task.columns_of_block);
      const float apart = part.mean - shift;
      total = fmaf(apart, count, total);
      squares = fmaf(apart * apart, count, squares);
    }
  }
  const float apart = total / task.columns;
  float variance = (squares - apart * total) / task.columns;
  if (variance < 0.0f) variance = 0.0f;  // not fmaxf, which makes 0 of a NaN
  return make_float2(shift + apart, rsqrtf(variance + task.eps));
}

/// The codes of four elements. `scaled` in pairs: `zero` times an infinity is a NaN, and nothing else changes.
template <typename T>
__device__ uint32_t codes_of(const Four<T>& y, typename Pair<T>::Type zero, float used) {
  using P = Pair<T>;
  const float2 first = P::floats(__hfma2(y.pairs[0], zero, y.pairs[0]));
  const float2 second = P::floats(__hfma2(y.pairs[1], zero, y.pairs[1]));
  return codes_of({first.x * used, first.y * used, second.x * used, second.y * used});
}

/// Rows of four codes to columns of four codes.
__device__ void transpose(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t even01 = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t odd01 = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t even23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t odd23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(even01, even23, 0x5410);
  columns[1] = __byte_perm(even01, even23, 0x7632);
  columns[2] = __byte_perm(odd01, odd23, 0x5410);
  columns[3] = __byte_perm(odd01, odd23, 0x7632);
}

/// Weight (with its offset) and bias of a thread's columns: 1 and -0 for none, which change no bit.
struct Parameters {
  float weight[kWide];
  float bias[kWide];
};

__device__ Parameters parameters_at(const Task& task, int64_t at) {
  Parameters result;
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    result.weight[i] =
        task.weight == nullptr ? 1.0f : parameter(task.weight, task.weight_dtype, at + i) + task.weight_offset;
    result.bias[i] = task.bias == nullptr ? -0.0f : parameter(task.bias, task.bias_dtype, at + i);
  }
  return result;
}

/// y, in x's dtype, of four elements of a row; `statistic`: -mean * rstd, which is as exact as the mean is, and rstd.
template <typename T, bool Centre, bool RoundFirst>
__device__ Four<T> normalised(const uint2& loaded, float2 statistic, const Parameters& by) {
  using P = Pair<T>;
  const Four<T>& x = *reinterpret_cast<const Four<T>*>(&loaded);
  Four<T> y;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float2 value = P::floats(x.pairs[i]);
    value.x = Centre ? fmaf(value.x, statistic.y, statistic.x) : value.x * statistic.y;
    value.y = Centre ? fmaf(value.y, statistic.y, statistic.x) : value.y * statistic.y;
    y.pairs[i] = finished<T, Centre, RoundFirst>(value, by.weight + 2 * i, by.bias + 2 * i);
  }
  return y;
}

/// Where a thread's four columns are: in the matrix, and in a row of a stage; -1 where there are none.
struct Columns {
  int64_t at;
  int in_stage;
};

/// Step 3, of the rows from `first_row`, `tile` in shared memory, as `statistics` has `normalised`'s of each row.
/// `Whole`: all 32 rows exist and results are wanted, so nothing need be asked of each row.
template <typename T, bool Centre, bool RoundFirst, bool Whole, bool Emit>
__device__ void cast_columns(const Task& task, const uint8_t* tile, int pitch, int64_t first_row,
                             const float2* statistics, const Columns& columns, const Parameters& by, float used,
                             typename Pair<T>::Type& largest) {
  using P = Pair<T>;
  const int half = threadIdx.x % 32 / 16;
  const int64_t padded_rows = (task.rows + 15) / 16 * 16;
  const int64_t row0 = first_row + half * kHalf;
  const bool exist = columns.in_stage >= 0;
  const int rows_left = static_cast<int>(max(int64_t{0}, min(int64_t{kHalf}, task.rows - row0)));
  const int rows_here = exist ? (Whole ? kHalf : rows_left) : 0;
  const bool store_q = task.q != nullptr && !task.measuring && exist;
  const bool store_qt = task.qt != nullptr && !task.measuring && exist && row0 < padded_rows;
  const uint8_t* from = tile + half * kHalf * pitch + max(columns.in_stage, 0);
  uint8_t* q = task.q + row0 * task.columns + columns.at;
  T* y = static_cast<T*>(task.y) + row0 * task.columns + columns.at;
  const auto zero = P::rounded(make_float2(0.0f, 0.0f));
  uint32_t words[kWide][kHalf / 4];
#pragma unroll
  for (int four = 0; four < kHalf / 4; ++four) {
    uint2 loaded[4];  // before anything is stored, so that all loads are in flight at once
#pragma unroll
    for (int i = 0; i < 4; ++i) loaded[i] = *reinterpret_cast<const uint2*>(from + i * pitch);
    uint32_t rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = four * 4 + i;
      Four<T> result{};  // rows past the end are padding, which a mean or a bias must not fill
      if (Whole || row < rows_here) {
        result = normalised<T, Centre, RoundFirst>(loaded[i], statistics[half * kHalf + row], by);
      }
      if (!Whole || exist) {
        largest = __hmax2_nan(largest, __hmax2_nan(__habs2(result.pairs[0]), __habs2(result.pairs[1])));
      }
      rows[i] = codes_of(result, zero, used);
      if (Whole ? exist : row < rows_here) {
        if (store_q) *reinterpret_cast<uint32_t*>(q + i * task.columns) = rows[i];
        if (Emit) *reinterpret_cast<uint2*>(y + i * task.columns) = *reinterpret_cast<const uint2*>(&result);
      }
    }
    from += 4 * pitch;
    q += 4 * task.columns;
    y += 4 * task.columns;
    uint32_t turned[4];
    transpose(rows, turned);
#pragma unroll
    for (int i = 0; i < kWide; ++i) words[i][four] = turned[i];
  }
  if (store_qt) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      *reinterpret_cast<uint4*>(task.qt + (columns.at + i) * padded_rows + row0) =
          make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
    }
  }
}

template <typename T, bool Centre, bool RoundFirst, typename... Arguments>
__device__ void cast(const Task& task, const uint8_t* tile, int pitch, int64_t first_row, Arguments&... arguments) {
  const bool whole = first_row + kRows <= task.rows && !task.measuring;
  const bool emit = task.y != nullptr && !task.measuring;
  if (whole && emit) {
    cast_columns<T, Centre, RoundFirst, true, true>(task, tile, pitch, first_row, arguments...);
  } else if (whole) {
    cast_columns<T, Centre, RoundFirst, true, false>(task, tile, pitch, first_row, arguments...);
  } else if (emit) {
    cast_columns<T, Centre, RoundFirst, false, true>(task, tile, pitch, first_row, arguments...);
  } else {
    cast_columns<T, Centre, RoundFirst, false, false>(task, tile, pitch, first_row, arguments...);
  }
}

/// What the blocks of a cluster and the warps of a block share.
struct Shared {
  Part parts[2][kLargestCluster * kRows];
  uint64_t told[2];           // all parts of a turn have come: their bytes, or in a block of whole rows an arrival each
  uint64_t filled[kStages];   // all rows of a turn have come
  uint64_t emptied[kStages];  // all warps are done with them
  float2 statistics[kWarps][kRows];  // of each warp alone: reading them costs less than shuffles
  float largest_of_warp[kWarps];
};

/// Which rows a cluster has in its n-th turn, and where a block of it keeps them.
struct Walk {
  int64_t first_group, clusters, groups;
  bool backwards;  // after a measuring launch: the L2 still holds the end
  int first_column, width, pitch;

  __device__ explicit Walk(const Task& task) {
    const int block = blockIdx.x % task.blocks_of_cluster;
    first_group = blockIdx.x / task.blocks_of_cluster;
    clusters = gridDim.x / task.blocks_of_cluster;
    groups = (task.rows + kRows - 1) / kRows;
    backwards = task.measured;
    first_column = block * task.columns_of_block;
    width = min(task.columns_of_block, task.columns - first_column);
    pitch = task.columns_of_block * 2;
  }
  __device__ int turns() const { return static_cast<int>((groups - first_group + clusters - 1) / clusters); }
  __device__ int64_t first_row(int turn) const {
    const int64_t group = first_group + turn * clusters;
    return (backwards ? groups - 1 - group : group) * kRows;
  }
  __device__ uint8_t* stage(uint8_t* stages, int turn) const { return stages + turn % kStages * kRows * pitch; }
};

/// The loading warp: asks for all rows of each turn, one lane for each, as soon as their stage is free.
template <typename T>
__device__ void load_rows(const Task& task, const Walk& walk, Shared& shared, uint8_t* stages) {
  const int lane = threadIdx.x % 32;
  const uint32_t bytes = walk.width * sizeof(T);
  for (int turn = 0; turn < walk.turns(); ++turn) {
    uint64_t* filled = &shared.filled[turn % kStages];
    if (turn >= kStages) await(&shared.emptied[turn % kStages], (turn / kStages - 1) % 2);
    // At the start every block gets its first rows before any gets its second: all begin to work sooner.
    if (turn > 0 && turn < kStages) await(&shared.filled[turn - 1], 0);
    const int64_t row = walk.first_row(turn);
    const int rows_here = static_cast<int>(min(int64_t{kRows}, task.rows - row));
    if (lane == 0) expect_bytes(filled, bytes * rows_here);
    __syncwarp();
    if (lane < rows_here) {
      const T* from = static_cast<const T*>(task.x) + (row + lane) * task.stride + walk.first_column;
      copy_in(walk.stage(stages, turn) + lane * walk.pitch, from, bytes, filled);
    }
  }
}

/// Whether a block has whole rows. Then nothing is sent: such stores are for clusters of two blocks and more.
__device__ bool alone(const Task& task) { return task.blocks_of_cluster == 1; }

__device__ uint32_t bytes_of_parts(const Task& task) { return task.blocks_of_cluster * kRows * sizeof(Part); }

/// Step 1.
template <typename T, bool Centre>
__device__ void reduce_rows(const Task& task, const Walk& walk, Shared& shared, uint8_t* stages, int turn) {
  static_assert(kRowsOfWarp == 2 && kRowsOfWarp * kLargestCluster == 32, "one lane sends one row to one block");
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  await(&shared.filled[turn % kStages], turn / kStages % 2);
  const uint8_t* rows = walk.stage(stages, turn) + warp * kRowsOfWarp * walk.pitch;
  const Part first = part_of<T, Centre>(rows, walk.width);
  const Part second = part_of<T, Centre>(rows + walk.pitch, walk.width);
  const int other = lane % kLargestCluster;
  if (other < task.blocks_of_cluster) {
    const bool upper = lane < kLargestCluster;
    const float2 part = make_float2(upper ? first.mean : second.mean, upper ? first.squares : second.squares);
    const int block = blockIdx.x % task.blocks_of_cluster;
    const int row = warp * kRowsOfWarp + lane / kLargestCluster;
    Part* const place = &shared.parts[turn % 2][block * kRows + row];
    if (alone(task)) {
      *place = {part.x, part.y};
      arrive(&shared.told[turn % 2]);
    } else {
      send(part, place, &shared.told[turn % 2], other);
    }
  }
}

__device__ void start_barriers(const Task& task, Shared& shared) {
  for (int i = 0; i < kStages; ++i) {
    start_barrier(&shared.filled[i], 1);
    start_barrier(&shared.emptied[i], kWarps);
  }
  for (uint64_t& barrier : shared.told) {
    start_barrier(&barrier, alone(task) ? kRows : 1);
    if (!alone(task)) expect_bytes(&barrier, bytes_of_parts(task));
  }
  publish_barriers();
}

/// The scale: the given one, or that of the amax which has been measured; writes its inverse.
__device__ float find_scale(const Task& task) {
  float used = task.scale == nullptr ? 0.0f : *task.scale;
  if (task.measured && !(used > 0.0f)) used = scale_of(*static_cast<volatile float*>(task.amax), task.formula);
  if (blockIdx.x == 0 && threadIdx.x == 0) *task.scale_inv = 1.0f / used;
  return used;
}

/// The largest of all lanes' magnitudes, infinity if one is not finite.
__device__ float largest_of_warp(float2 two) {
  float amax = is_finite(two.x) && is_finite(two.y) ? fmaxf(two.x, two.y) : __int_as_float(0x7F800000);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  return amax;
}

/// A working warp.
template <typename T, bool Centre, bool RoundFirst>
__device__ void work(const Task& task, const Walk& walk, Shared& shared, uint8_t* stages) {
  using P = Pair<T>;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int column = warp * kStep + lane % 16 * kWide;
  const bool exist = column < walk.width;
  const Columns columns{walk.first_column + column, exist ? column * static_cast<int>(sizeof(T)) : -1};
  const Parameters by = exist ? parameters_at(task, columns.at) : Parameters{};
  const float used = task.measuring ? 1.0f : find_scale(task);
  const bool writes_statistics = blockIdx.x % task.blocks_of_cluster == 0 && warp == 0 && !task.measuring;
  typename P::Type largest = P::rounded(make_float2(0.0f, 0.0f));
  const int turns = walk.turns();
  reduce_rows<T, Centre>(task, walk, shared, stages, 0);
  for (int turn = 0; turn < turns; ++turn) {
    await(&shared.told[turn % 2], turn / 2 % 2);
    float2 statistic = merged<Centre>(shared.parts[turn % 2] + lane, task);
    const int64_t first_row = walk.first_row(turn);
    if (writes_statistics && first_row + lane < task.rows) {
      if (Centre) task.mean[first_row + lane] = statistic.x;
      task.rstd[first_row + lane] = statistic.y;
    }
    float2* const statistics = shared.statistics[warp];
    statistics[lane] = make_float2(-statistic.x * statistic.y, statistic.y);
    // The others send parts of turn + 2 only after they have had this block's of turn + 1, which follow.
    const bool more = turn + 2 < turns && !alone(task);
    if (threadIdx.x == 0 && more) expect_bytes(&shared.told[turn % 2], bytes_of_parts(task));
    __syncwarp();
    if (turn + 1 < turns) reduce_rows<T, Centre>(task, walk, shared, stages, turn + 1);
    const uint8_t* tile = walk.stage(stages, turn);
    cast<T, Centre, RoundFirst>(task, tile, walk.pitch, first_row, statistics, columns, by, used, largest);
    __syncwarp();
    if (lane == 0) arrive(&shared.emptied[turn % kStages]);
  }
  const float amax = largest_of_warp(P::floats(largest));
  if (lane == 0) shared.largest_of_warp[warp] = amax;
}

#endif

template <typename T, bool Centre, bool RoundFirst>
__global__ void __launch_bounds__(kThreads, 1) norm_quantize_kernel(const __grid_constant__ Task task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Shared shared;
  if (task.measuring && task.scale != nullptr && *task.scale > 0.0f) return;  // the whole grid does

  if (threadIdx.x == 0) start_barriers(task, shared);
  meet_cluster();  // the barriers stand, and the other blocks' shared memory may be written
  const Walk walk(task);
  if (threadIdx.x / 32 == kWarps) {
    load_rows<T>(task, walk, shared, stages);
  } else {
    work<T, Centre, RoundFirst>(task, walk, shared, stages);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float amax = 0.0f;
    for (const float largest : shared.largest_of_warp) amax = fmaxf(amax, largest);
    atomicMax(reinterpret_cast<int*>(task.amax), __float_as_int(amax));
  }
#endif
}

}  // namespace
}  // namespace te_compile
