"""Programs that random search found and te_fp8 once got wrong, each as small as it could be made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.check import Case, check
from tests.fuzz.program import Setting, checkpoint

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_what_a_checkpointed_block_gives_to_an_fp8_linear_and_to_a_sum_can_be_recomputed() -> None:
    """A producer outside of the block emitted the block's result, which the partitioner may not save."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shift = nn.Linear(32, 32), nn.Parameter(torch.tensor(0.7))
            self.second, self.third = nn.Linear(32, 16), nn.Linear(16, 32)

        def block(self, x: Tensor) -> Tensor:
            return x + self.shift

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = checkpoint(self.block, self.first(x) + y)
            return self.third(self.second(z)) + z

    check(Case(Model, lambda more: (torch.randn(3, 4, 32), torch.randn(3, 4, 32))))


def test_a_cast_requires_no_gradient_where_nothing_does() -> None:
    """Under no_grad, PyTorch's own code of the primitive for casts gives back what requires one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(y), x.to(torch.float16).float()[:, 0]

    check(Case(Model, lambda more: (torch.randn(5, 32, dtype=torch.bfloat16, requires_grad=True), torch.randn(5, 32))))


def test_what_a_norm_before_an_fp8_linear_returned_may_be_changed_in_place() -> None:
    """te::norm returned a view from its autograd function, which autograd forbids to change."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.RMSNorm(48), nn.Linear(48, 32)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.norm(x)
            z[..., :2] = y[..., :2]
            return self.fc(z)

    check(Case(Model, lambda more: (torch.randn(2, 5, 48, requires_grad=True), torch.randn(2, 5, 48))))


class Forms(nn.Module):
    """Products that are written out as linears: an einsum, a convolution, experts with and without what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.conv = nn.Parameter(torch.randn(32, 48) / 6), nn.Conv1d(32, 48, 1)
        self.experts, self.bias = nn.Parameter(torch.randn(2, 32, 48) / 6), nn.Parameter(torch.randn(2, 1, 48))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        batched = torch.bmm(x, self.experts), torch.baddbmm(self.bias, x, self.experts)
        return torch.einsum("abk,kn->abn", x, self.w), self.conv(x.mT), *batched


def test_products_that_are_written_out_keep_the_dtype_of_an_autocast_around_the_call() -> None:
    """A baddbmm became a sum of bfloat16 and float32, which is float32."""
    check(Case(Forms, lambda more: (torch.randn(2, 7, 32),), Setting(autocast=True)))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_products_that_are_written_out_keep_the_dtype_of_an_autocast_in_the_graph(checkpointed: bool) -> None:
    """They were measured while the passes ran, where no autocast is at work."""

    class Model(Forms):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", torch.bfloat16):
                return checkpoint(super().forward, x) if checkpointed else super().forward(x)

    check(Case(Model, lambda more: (torch.randn(2, 7, 32, requires_grad=True),)))


def test_a_view_that_memory_does_not_allow_is_not_taken_by_a_producer() -> None:
    """The fake tensors that passes look at allow it where a dimension of size one lies between."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed, self.out = nn.Linear(24, 96), nn.Linear(16, 16)
            self.gain = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            _, k, _ = self.packed(x).unflatten(-1, (3, 2, 16)).unbind(-3)
            return self.out(k * self.gain)

    check(Case(Model, lambda more: (torch.randn(2, 1, 24),)))


@pytest.mark.parametrize("spelled_out", [False, True])
def test_what_attention_reads_instead_of_a_copy_may_be_changed_behind_it(spelled_out: bool) -> None:
    """The attention that stood there kept a copy for its gradients; the one in its place kept what was overwritten."""

    class Model(nn.Module):
        def forward(self, q: Tensor, heads: Tensor) -> Tensor:
            k = heads[:, :, None].expand(-1, -1, 2, -1, -1).reshape(-1, 4, 5, 16)
            if spelled_out:
                y = (q @ k.mT / 4).softmax(-1) @ k
            else:
                y = F.scaled_dot_product_attention(q, k, k)
            with torch.no_grad():
                heads.mul_(0.5)
            return y

    q, heads = (3, 4, 5, 16), (3, 2, 5, 16)
    check(Case(Model, lambda more: (_bfloat16(*q), _bfloat16(*heads))))


def test_what_attention_returned_may_be_changed_in_place() -> None:
    class Model(nn.Module):
        def forward(self, hidden, q):
            scores = torch.einsum("bhqd,bhkd->bhqk", q, q) * 0.25
            weights = F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
            result = weights @ q
            result.mul_(0.5)
            return result

    def inputs(more):
        hidden = (torch.rand(2, 1, 16, 16) > 0.8) & ~torch.eye(16, dtype=torch.bool)
        return hidden, torch.randn(2, 2, 16, 16, requires_grad=True)

    check(Case(Model, inputs))


def test_a_mask_of_fixed_size_meets_sizes_that_are_symbols() -> None:
    """A causal mask was compared with one of the queries' symbolic length, which cannot be made."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(7, 7, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    check(Case(Model, lambda more: (torch.randn(2 + more, 4, 7, 8),), Setting(dynamic=True)))


@pytest.mark.parametrize("recomputed", ["second", "both"])
def test_what_a_checkpointed_block_quantises_may_be_quantised_before_it(recomputed: str) -> None:
    """PyTorch 2.15 made one of the quantizes and not of what is taken from them, and failed to partition the graph."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(64, 32)

        def block(self, x: Tensor) -> Tensor:
            y, z = self.first(x).chunk(2, -1)
            return torch.addcmul(z, y, z)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = checkpoint(self.block, x) if recomputed == "both" else self.block(x)
            return first, checkpoint(self.second, x)

    check(Case(Model, lambda more: (torch.randn(2, 12, 32),), Setting(recipe="current")))


def _bfloat16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
