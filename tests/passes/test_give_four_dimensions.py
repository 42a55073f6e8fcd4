"""Attention of three, five and more dimensions gets the four of fused kernels, exactly, and the result its own back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

import te_compile
from te_compile.passes.captured_nodes import value_of
from te_compile.passes.give_four_dimensions import give_four_dimensions
from te_compile.passes.text import ops_text
from tests.any_size import at_any_size
from tests.capturing import captured, rewritten

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

QUERIES, KEYS, WIDTH = 6, 9, 16
changed = partial(rewritten, give_four_dimensions)


def operands(*leading: int, key_heads: int = 0) -> list[Tensor]:
    """Queries, keys and values with these dimensions in front, keys and values of other heads where that is said."""
    of_keys = (*leading[:-1], key_heads) if key_heads else leading
    shapes = ((*leading, QUERIES, WIDTH), (*of_keys, KEYS, WIDTH), (*of_keys, KEYS, WIDTH + 8))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def attention_of(graph: Graph) -> torch.fx.Node:
    (node,) = graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    return node


def dimensions_in(graph: Graph) -> set[int]:
    node = attention_of(graph)
    return {value_of(each).dim() for each in (node, *node.args[:3])}


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dimensions", [3, 5])
def test_heads_that_no_fast_kernel_takes_keep_their_dimensions_in_training(dimensions: int) -> None:
    leading = (2,) if dimensions == 3 else (2, 3, 2)
    wide = [torch.randn(*leading, 8, 264).requires_grad_() for _ in range(3)]
    assert changed(plain, *wide)[0] == 0
    with torch.no_grad():
        gm, _ = captured(plain, *wide)
        assert give_four_dimensions(gm.graph) == 1


@pytest.mark.parametrize("run", [plain, causal])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 4), (2, 1, 3, 4)])
def test_attention_gets_four_dimensions(run: Callable[..., Tensor], leading: tuple[int, ...]) -> None:
    count, graph = changed(run, *operands(*leading))
    assert count == 1 and dimensions_in(graph) == {4}
    assert value_of(graph.output_node().args[0][0]).shape == (*leading, QUERIES, WIDTH + 8)


def test_the_text_of_a_single_head() -> None:
    _, graph = changed(plain, *operands(3))
    assert ops_text(graph) == (
        "unsqueeze = .unsqueeze(l_q_, 1)\nunsqueeze_1 = .unsqueeze(l_k_, 1)\nunsqueeze_2 = .unsqueeze(l_v_, 1)\n"
        "scaled_dot_product_attention_1 = scaled_dot_product_attention(unsqueeze, unsqueeze_1, unsqueeze_2, None, 0.0, "
        "False, scale=0.3, enable_gqa=False)\nsqueeze = .squeeze(scaled_dot_product_attention_1, 1)\nreturn (squeeze,)"
    )


MASKS = {
    (3,): [(KEYS,), (QUERIES, KEYS), (3, QUERIES, KEYS), (3, 1, KEYS), (1, QUERIES, KEYS)],
    (): [(KEYS,), (QUERIES, KEYS), (QUERIES, 1)],
    (2, 3, 4): [
        (QUERIES, KEYS),
        (4, QUERIES, KEYS),
        (1, 1, 4, QUERIES, KEYS),
        (2, 3, 1, 1, KEYS),
        (2, 3, 4, QUERIES, 1),
    ],
}


@pytest.mark.parametrize("kind", ["added", "bool"])
@pytest.mark.parametrize(("leading", "shape"), [(leading, shape) for leading in MASKS for shape in MASKS[leading]])
def test_a_mask_comes_along(leading: tuple[int, ...], shape: tuple[int, ...], kind: str) -> None:
    mask = torch.randn(shape).requires_grad_() if kind == "added" else torch.rand(shape) < 0.7

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    count, graph = changed(masked, *operands(*leading), mask)
    assert count == 1 and dimensions_in(graph) == {4}


def test_heads_of_keys_that_are_shared_stay_heads() -> None:
    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    count, graph = changed(shared, *operands(2, 3, 4, key_heads=2))
    assert count == 1 and value_of(attention_of(graph)).shape[:2] == (6, 4)


def test_windows_of_packed_projections_are_read_where_they_lie() -> None:
    """[batch, blocks, positions, 3, heads, features], as blocks within a picture have it: batch and blocks are one."""

    def blocks(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 4, WIDTH)).permute(3, 0, 4, 1, 2, 5).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 4, 1).reshape(2, 5, QUERIES, -1)

    qkv = torch.randn(2, 5, QUERIES, 3 * 4 * WIDTH, requires_grad=True)
    count, graph = changed(blocks, qkv)
    query = attention_of(graph).args[0]
    assert count == 1 and value_of(attention_of(graph)).shape[:2] == (10, 4)
    assert isinstance(query, torch.fx.Node) and value_of(query).stride() == (QUERIES * 12 * WIDTH, WIDTH, 12 * WIDTH, 1)


def test_views_of_the_result_stay_views() -> None:
    """A model may rely on the order in which PyTorch's kernel for any number of dimensions writes it."""

    def viewed(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 4, WIDTH)).permute(3, 0, 4, 1, 2, 5).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).view(2, 4, 5 * QUERIES, WIDTH).sin()

    assert changed(viewed, torch.randn(2, 5, QUERIES, 3 * 4 * WIDTH, requires_grad=True))[0] == 1


class _Multiplied(TorchDispatchMode):
    """The dtypes of the products of matrices that attention makes outside of a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.bmm.default:
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("leading", "products"), [((3,), 2 if torch.__version__ < "2.14" else 0), ((2, 3), 0), ((2, 3, 4), 2)]
)
def test_pytorch_fuses_four_dimensions_alone_and_computes_others_in_float32(
    leading: tuple[int, ...], products: int
) -> None:
    """What the pass is for; PyTorch 2.14 fuses three dimensions itself."""
    q, k, v = (torch.randn(*leading, QUERIES, WIDTH).bfloat16() for _ in "qkv")
    with _Multiplied() as seen:
        F.scaled_dot_product_attention(q, k, v)
    assert seen.dtypes == [torch.float32] * products


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def masked_for_each_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=q.new_zeros(1, 3, 1, QUERIES, KEYS))


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v).mul_(2)


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (plain, operands(2, 4)),
        (dropped, operands(3)),
        (masked_for_each_part, operands(2, 3, 4)),
        (plain, [operands(3)[0], *operands(1)[1:]]),
        (plain, [operands(2, 3, 4)[0], *operands(2, 1, 4)[1:]]),
        (in_place, operands(3)),
        (plain, operands(1 << 16)),
    ],
    ids=["four", "dropout", "mask", "broadcast", "broadcast_block", "in_place", "longer_than_a_grid"],
)
def test_what_stays(run: Callable[..., Tensor], given: list[Tensor]) -> None:
    graph = captured(run, *given)[0].graph
    before = ops_text(graph)
    assert give_four_dimensions(graph) == 0 and ops_text(graph) == before


class SingleHead(nn.Module):
    """As a first attention of one's own looks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1), is_causal=True))


def test_a_model_with_one_head_trains_at_any_size() -> None:
    sizes = [(2, 6), (3, 11), (5, 4)]
    for_one, for_any = at_any_size(SingleHead(), lambda *size: [torch.randn(*size, 32)], sizes)
    counts = [{each.name: each.count for each in record.passes} for record in (for_one, for_any)]
    assert [each["give_four_dimensions"] for each in counts] == [1, 1]


def test_a_report_tells_of_it() -> None:
    report = te_compile.explain(SingleHead(), torch.randn(2, 6, 32))
    assert {each.name: each.count for each in report.graphs[0]}["give_four_dimensions"] == 1
    assert [each.mask for each in report.attentions] == ["is_causal"]
