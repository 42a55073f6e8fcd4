// te_cuda_attention for heads of up to 128 features.
#include "attention_launch.cuh"

namespace te_compile::attention {

template void run_forward<kWide>(const te_attention&);
template void run_backward<kWide>(const te_attention&);

}  // namespace te_compile::attention
