"""The fused layer that torch.nn calls in inference is written out, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_compile.passes.find_linears import STAYS_CLOSED
from te_compile.passes.open_encoder_layers import open_encoder_layers
from tests.capturing import captured
from tests.compiling import compiled, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, LENGTH, WIDTH, HEADS = 3, 5, 32, 2
FUSED = torch._transformer_encoder_layer_fwd


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    """A small one for inference; its biases are not the zeros that torch begins with."""
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, **options).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def hides(*shape: int) -> Tensor:
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


MASKS: dict[str, Any] = {
    "none": dict,
    "by key": lambda: {"src_key_padding_mask": hides(BATCH, LENGTH)},
    "by pair": lambda: {"src_mask": hides(LENGTH, LENGTH)},
    "both": lambda: {"src_mask": hides(LENGTH, LENGTH), "src_key_padding_mask": hides(BATCH, LENGTH)},
}


@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "gelu")])
@pytest.mark.parametrize("mask", MASKS)
def test_an_opened_layer_computes_what_torch_does(mask: str, norm_first: bool, activation: str) -> None:
    model, given, x = layer(norm_first=norm_first, activation=activation), MASKS[mask](), torch.randn(3, LENGTH, WIDTH)
    with torch.no_grad():
        gm, examples = captured(lambda x: model(x, **given), x)
        assert gm.graph.find_nodes(op="call_function", target=FUSED)
        assert open_encoder_layers(gm.graph) == 1
        gm.graph.lint()
        gm.recompile()
        assert not gm.graph.find_nodes(op="call_function", target=FUSED)
        assert len(gm.graph.find_nodes(op="call_function", target=F.linear)) == 4
        torch.testing.assert_close(gm(*examples)[0], model(x, **given), rtol=1e-5, atol=1e-5)


def test_a_layer_with_a_mask_that_is_not_understood_stays_closed_and_says_why() -> None:
    model, mask, x = layer(), hides(BATCH, LENGTH), torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        gm, _ = captured(lambda x: model(x, src_key_padding_mask=mask), x)
        (fused,) = gm.graph.find_nodes(op="call_function", target=FUSED)
        fused.args = (*fused.args[:-1], 7)
        assert open_encoder_layers(gm.graph) == 0
    assert "mask of unknown type" in fused.meta[STAYS_CLOSED]
    assert gm.graph.find_nodes(op="call_function", target=FUSED) == [fused]


def test_a_layer_whose_epsilon_is_a_symbol_at_first_is_opened() -> None:
    model, x = layer(), torch.randn(BATCH, 16, WIDTH)
    with torch.no_grad():
        y = compiled(model, dynamic=True, strict=True)(x)  # Dynamo captures floats as inputs, and as numbers thereafter
        assert relative_error(y, model(x)) < 0.1
