"""Products of several kinds on a GPU, the same in each process.

    python -m tests.programs.products_on_gpu

Prints JSON: how many plans there are, for how many algorithms were timed here, and a digest of all results' bits.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from te_compile.kernels import cublaslt, native

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(rows, columns).to(dtype).cuda()


def products() -> list[Tensor]:
    """What models ask for; long contractions, over which algorithms differ in how they add up."""
    one = torch.ones((), device="cuda")
    x, w, dy = codes(512, 4096), codes(768, 4096), codes(512, 4096, E5M2)
    bias, aux = torch.randn(768).bfloat16().cuda(), torch.randn(512, 768).bfloat16().cuda()
    gradient = torch.randn(512, 768).cuda()
    return [
        cublaslt.gemm(x, w, one, one, None, torch.bfloat16, "fast"),
        cublaslt.gemm(x, w, one, one, bias, torch.bfloat16, "fast", addend=aux),
        cublaslt.gemm(dy, w, one, one, None, torch.bfloat16, "split"),
        cublaslt.gemm(dy, w, one, one, None, torch.float32, "split", addend=gradient, out=gradient),
        *cublaslt.gemm_gelu_aux(x, w, one, one, bias, "fast"),
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    digest = hashlib.sha256()
    for result in (*products(), *products()):
        digest.update(result.view(torch.uint8).cpu().numpy().tobytes())
    kept, timed = native.module().cublaslt_plans()
    print(json.dumps({"kept": kept, "timed": timed, "digest": digest.hexdigest()}))
