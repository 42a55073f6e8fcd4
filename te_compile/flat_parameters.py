"""Which of the user's parameters a tensor is that FSDP's flat parameter holds.

``FullyShardedDataParallel`` lays the parameters of a module into a flat one and, for the length of a forward, gives the
module views of it, new ones in each call. A state belongs to what lasts and has a name: with ``use_orig_params=True``,
without which Dynamo captures nothing, the user's parameters go on living beside the flat one, as this rank's shards.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter


def parameter_of(tensor: Tensor) -> Parameter | None:
    """The parameter of the user's model that ``tensor`` is in this call: itself, or the one that FSDP's view shows.

    None for any other tensor.
    """
    if isinstance(tensor, Parameter):
        return tensor
    flat: Any = tensor._base if isinstance(tensor, Tensor) and tensor._is_view() else None
    if not getattr(flat, "_is_flat_param", False):
        return None
    return _at(flat, tensor.storage_offset() - flat.storage_offset())


def _at(flat: Any, offset: int) -> Parameter | None:
    """The parameter that begins ``offset`` elements into ``flat``, between paddings that belong to none."""
    parameters = iter(getattr(flat, "_params", None) or ())
    begin = 0
    for elements, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        parameter = None if is_padding else next(parameters, None)
        if begin == offset and not is_padding:
            return parameter
        begin += elements
    return None


def has_flat_parameters(model: nn.Module) -> bool:
    """Does FSDP hold parameters of ``model`` in flat ones?"""
    return any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules())
