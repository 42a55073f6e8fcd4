// Several ways to do the same on a GPU: which one is the fastest?
#pragma once

#include <cstddef>
#include <functional>

#include <cuda_runtime_api.h>

namespace te_compile {

/// The number of the fastest of `count` ways, on a stream that is not captured. enqueue(which) has the stream do it once
/// and says whether it could; `launches` of them in a row are timed. The first way wins against what is hardly faster,
/// and if none can be done.
size_t fastest_of(size_t count, cudaStream_t stream, const std::function<bool(size_t)>& enqueue, int launches);

}  // namespace te_compile
