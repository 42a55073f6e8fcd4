"""The user's model behind its wrappers, and the names that its parameters had before anything wrapped it."""

from __future__ import annotations

from torch import nn

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes in which torch.compile, FSDP and its checkpointing hold the module that is the user's."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside torch.compile's and data parallelism's."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def parameters_by_name(model: nn.Module, every_alias: bool = False) -> dict[str, nn.Parameter]:
    """The parameters under the names that the model had before anything wrapped it; a tied one under its first name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, whose parameters have the FP8 state, not {type(model).__name__}")
    named = unwrapped(model).named_parameters(remove_duplicate=not every_alias)
    return {".".join(part for part in name.split(".") if part not in WRAPPERS): each for name, each in named}
