// te_cuda_attention for heads of up to 64 features.
#include "attention_launch.cuh"

namespace te_compile::attention {

template void run_forward<kNarrow>(const te_attention&);
template void run_backward<kNarrow>(const te_attention&);

}  // namespace te_compile::attention
