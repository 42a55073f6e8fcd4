"""Values of tensors that a look at a model may write to, of whatever kind they are, to be put back.

Whether a tensor was written to must be told without writing to it, and from its values: batch norm writes its
statistics without counting, so versions would not do. A sparse, nested or otherwise composed tensor is told by the
plain ones that it consists of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDICES = {
    torch.sparse_coo: ("_indices",),
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@contextmanager
def tensor_values(tensors: Iterable[Tensor | None]) -> Iterator[None]:
    """Put back the values of tensors that are written to; parameters, too large to copy, are left out."""
    with ExitStack() as stack:  # one that cannot be put back keeps none of the others from it
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
                with torch.no_grad():
                    stack.callback(_put_back, tensor, tensor.detach().clone())
        yield


def _put_back(tensor: Tensor, value: Tensor) -> None:
    if not _same_bits(tensor, value):
        with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
            tensor.copy_(value)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, NaN or not?"""
    if isinstance(a, FakeTensor):
        return True  # it has no values
    of_both = [list(_parts(each)) for each in (a, b)]
    return len(of_both[0]) == len(of_both[1]) and all(map(_same_bits_of_parts, *of_both))


def _same_bits_of_parts(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    plain = [torch.resolve_neg(torch.resolve_conj(t.detach())) for t in (a, b)]
    whole = [torch.view_as_real(t) if t.is_complex() else t for t in plain]
    # Of one size with the elements: a view of another size would want them side by side.
    return torch.equal(*(t.view(_INTEGERS[t.element_size()]) for t in whole))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that ``tensor`` consists of."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name))
        return
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout in _INDICES:
            values = "_values" if tensor.layout == torch.sparse_coo else "values"
            yield from (getattr(tensor.detach(), name)() for name in (*_INDICES[tensor.layout], values))
        elif tensor.layout != torch.strided:
            yield tensor.to_dense()
        elif tensor.is_quantized:
            yield tensor.int_repr()
        elif tensor.is_nested:
            yield tensor.values()
        else:
            yield tensor.as_subclass(Tensor)
