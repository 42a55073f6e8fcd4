"""Small models in which each linear is used in one way, and what a training step of them is compared by."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_compile.passes import manager
from tests.compiling import compiled, cosine, relative_error, step_from, train_step

L = 1024  # amax_history_len of the default recipe
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-3}
"""For one linear's result and gradients, by their dtype. Seen are 3e-7, 6e-5 and 1e-4: where few last bits differ, few
numbers round to another."""


class Linear(nn.Module):
    """One linear, in a module of its own because a bare nn.Linear never reaches a backend."""

    def __init__(self, k: int = 32, n: int = 48, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc = nn.Linear(k, n, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Mlp(nn.Module):
    """Two linears and an activation between them."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Conv1DModel(nn.Module):
    """Hugging Face's Conv1D: addmm with the weight stored [K, N]."""

    def __init__(self, k: int = 32, n: int = 48) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, n) / k**0.5), nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], y.shape[-1])


class Attention(nn.Module):
    """Three linears that read one tensor."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, 16, bias=False), nn.Linear(d, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return torch.cat([self.q(h).sin(), self.k(h).cos(), self.v(h).tanh()], dim=-1)


class Chain(nn.Module):
    """Three linears in a row."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def any_length() -> int:
    """A number of tokens, with no regard to what FP8 GEMMs like."""
    return random.randrange(3, 50)


def all_fp8(name: str, module: nn.Module) -> bool:
    return True


def assert_same_numbers(model: nn.Module, reference: nn.Module, x: Tensor, tolerance: float, **options: Any) -> None:
    """One training step of compiled ``model`` and of ``reference``, both from one gradient of the result: same result,
    gradients and dtypes."""
    with torch.no_grad():
        dy = torch.randn_like(reference(x))
    expected, expected_gradients = step_from(reference, reference, dy, x)
    got, got_gradients = step_from(model, compiled(model, **options), dy, x)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert relative_error(got, expected) < tolerance
    assert got_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert got_gradients[name].dtype == gradient.dtype, name
        assert relative_error(got_gradients[name], gradient) < tolerance, name


def assert_close_steps(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Two training steps of a deeper model, in which a last bit may have pushed a number to the next FP8 code."""
    assert relative_error(got[0], expected[0]) < 1e-2
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert cosine(got[1][name], gradient) > 0.998, name


def record_of_one_step(model: nn.Module, x: Tensor, **options: Any) -> manager.Compilation:
    """The record of one compiled training step of ``model``."""
    with manager.recording() as records:
        train_step(model, compiled(model, **options), x)
    (record,) = records
    return record
