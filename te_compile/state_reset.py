"""A fresh start for the FP8 state of a model whose numbers are others now:

    model.load_state_dict(another_training)
    te_compile.reset_state(model)

Scales and histories are those of the data that a training met. Other weights, another initialisation in place or
another kind of data make others, and a long history remembers the old ones for as many steps as it has.
"""

from __future__ import annotations

from torch import nn

from te_compile.parameter_names import parameters_by_name
from te_compile.state import start_afresh
from te_compile.weight_cache import forget_copies


def reset_state(model: nn.Module) -> None:
    """Forget all scales and amax histories of ``model``: the next training step is calibrated like the first one.

    model: the model, what ``torch.compile`` made of it, or a part of it; nothing happens where there is no state. Until
    a training step has run, calls without gradients measure each tensor that they quantise. Backward passes of earlier
    forwards still go by the scales of those. A CUDA graph that you captured yourself has the old state: capture
    another one. Raises TypeError for what is no module.
    """
    parameters = list(parameters_by_name(model).values())
    for parameter in parameters:
        start_afresh(parameter)
    forget_copies(parameters)  # they were cast by the scales from before
