"""Textbook FP8 for any program, without a word about its modules.

Every product with a weight, in whatever form the program writes it, becomes

    y = B(product(Q(x), Q(w))) + b        Q: rounds to E4M3; gradients pass       B: rounds the gradient to E5M2

in fp32, by standing in for the torch functions while the program runs. A weight is a parameter or what is made from
parameters and buffers alone. Which of the products run in FP8 is what te_fp8's own plan said.

Each emulation rounds on a grid of its own: scales are drawn between half and the whole of what would just fit. Several
of them tell how far FP8 may move a result; a correct te_fp8 is one more of them.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from te_compile.passes.names import owner
from te_compile.passes.plan import Site
from tests.emulation import BACKWARD, FORWARD

Product = tuple[Callable[..., Tensor], Any, Any, Any]
"""What multiplies, x, the weight, and what is added."""


class Scales:
    """The scale of each quantised tensor of a program: what just fits it or, ``delayed``, what fitted its largest
    number in the steps before; then less by a random factor."""

    def __init__(self, dice: random.Random | None, delayed: bool) -> None:
        self.dice, self.delayed = dice, delayed
        self.before: dict[str, Tensor] = {}
        self.now: dict[str, Tensor] = {}

    def next_step(self) -> None:
        """What this step has seen counts from now on."""
        self.before = {
            **self.before,
            **{what: self._larger(self.before, what, amax) for what, amax in self.now.items()},
        }

    def rounded(self, t: Tensor, dtype: torch.dtype, what: str, each: bool) -> Tensor:
        """``t`` after a trip through FP8, in fp32; ``each``: every matrix of a batch has a scale of its own."""
        largest, wide = torch.finfo(dtype).max, t.detach().float()
        if not wide.numel():
            return wide
        amax = wide.abs().amax((-2, -1), keepdim=True) if each else wide.abs().amax()
        if bool(amax.max().isfinite()) and self.delayed:
            self.now[what] = self._larger(self.now, what, amax.max())
            amax = self.before.get(what, amax)
        room = 1.0 if self.dice is None else self.dice.uniform(0.5, 1.0)
        scale = torch.where((amax > 0) & amax.isfinite(), room * largest / amax, 1.0)
        return (wide * scale).clamp(-largest, largest).to(dtype).float() / scale

    def _larger(self, known: dict[str, Tensor], what: str, amax: Tensor) -> Tensor:
        return torch.maximum(known[what], amax) if what in known else amax


def statuses_of(sites: list[Site], model: nn.Module) -> dict[str, list[bool]]:
    """For each linear of ``model`` by its name, in order, whether it runs in FP8."""
    found: dict[str, list[bool]] = {}
    for site in sites:
        found.setdefault(site.name, []).append(site.status == "fp8")
    # After a graph break names begin at the part of the model that was captured.
    full = {owner(name) for name, _ in model.named_parameters()} - found.keys()
    ends = {name: max((each for each in found if name.endswith(f".{each}")), key=len, default="") for name in full}
    found |= {name: found[end] for name, end in ends.items() if end}
    # Equal layers behind graph breaks run the code of those that came first, and are in no graph of their own.
    alike = {_without_numbers(name): uses for name, uses in found.items()}
    return {name: alike[kind] for name in full if (kind := _without_numbers(name)) in alike} | found


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


class Fp8Products(TorchFunctionMode):
    """``statuses``: for each linear by its name, whether its uses run in FP8, in the order of the program.

    ``unreported``: the names of the products with a weight that ``statuses`` does not have.
    """

    def __init__(self, model: nn.Module, statuses: dict[str, list[bool]], scales: Scales) -> None:
        super().__init__()
        self.owners = {id(p): (name, p.numel()) for name, p in model.named_parameters()}
        self.held = {id(b) for b in model.buffers()}
        self.alive: list[Tensor] = []  # an id is a name only as long as its tensor lives
        self.statuses, self.scales = statuses, scales
        self.used: Counter[str] = Counter()
        self.unreported: set[str] = set()
        self.products = 0
        self.epsilon = 0.0  # of the coarsest dtype met

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and self._is_opened(args):
            with self:  # its linears are inside
                return _opened(func, args, kwargs)
        product = _product(func, args, kwargs)
        if func in _MATRICES and self._is_weight(args[0]) and not self._is_weight(args[1]) and args[0].dim() == 2:
            product = (lambda x, w: torch.matmul(w, x)), args[1], args[0], None
        if product is not None and self._is_weight(product[2]):
            return self._multiply(product, func, args, kwargs)
        result = func(*args, **kwargs)
        self._follow(args, kwargs, result)
        self._note(result)
        return result

    def _is_opened(self, args: Any) -> bool:
        """Has the plan the linears inside of this attention, and not the attention as one?"""
        return owner(self.owners[id(args[11])][0]) in self.statuses

    def _is_weight(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self.owners and value.dim() >= 2

    def _follow(self, args: Any, kwargs: Any, result: Any) -> None:
        """What is made from weights and buffers alone is a weight too."""
        sources = list(_tensors((args, kwargs)))
        known = [self.owners[id(t)] for t in sources if id(t) in self.owners]
        if not known or any(id(t) not in self.owners and id(t) not in self.held for t in sources):
            if sources and all(id(t) in self.held for t in sources):
                self._remember(result, None)
            return
        self._remember(result, max(known, key=lambda entry: entry[1]))

    def _note(self, result: Any) -> None:
        for made in _tensors(result):
            if made.is_floating_point():
                self.epsilon = max(self.epsilon, torch.finfo(made.dtype).eps)

    def _remember(self, result: Any, entry: tuple[str, int] | None) -> None:
        for made in _tensors(result):
            self.alive.append(made)
            if entry is None:
                self.held.add(id(made))
            else:
                self.owners[id(made)] = entry

    def _multiply(self, product: Product, func: Any, args: Any, kwargs: Any) -> Tensor:
        call, x, w, added = product
        name = owner(self.owners[id(w)][0])
        reported = self.statuses.get(name)
        if reported is None and w.dim() == 2:  # a convolution is a linear only if it can be shown
            self.unreported.add(name)
        use = self.used[name]
        self.used[name] += 1
        if not reported or not (reported[use] if use < len(reported) else reported[-1]):
            result = func(*args, **kwargs)
            self._follow(args, kwargs, result)  # low-rank factors make a weight
            return result
        self.products += 1
        dtype = x.dtype
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        each = w.dim() == 3 and x.dim() == 3 and call in (torch.bmm, torch.matmul)  # an expert has scales of its own
        with torch.autocast(device, enabled=False):
            y = call(
                _Rounded.apply(x.to(dtype), self.scales, f"x of {name}", each),
                _Rounded.apply(w, self.scales, f"w of {name}", each),
            )
            y = _RoundedGradient.apply(y, self.scales, f"dy of {name}", each)
            result = (y if added is None else y + added.float()).to(dtype)
        self._note(result)
        return result

    def next_step(self) -> None:
        """The program begins again."""
        self.used.clear()
        self.scales.next_step()


def _opened(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` run inside, which would see the mode at work and ask it again."""
    check = F.has_torch_function
    F.has_torch_function = lambda tensors: False
    try:
        return func(*args, **kwargs)
    finally:
        F.has_torch_function = check


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


_MATRICES = {
    torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__,
}  # fmt: skip

_OF_A_LINEAR = ("input", "weight", "bias")


def _product(func: Any, args: Any, kwargs: Any) -> Product | None:
    """``func`` read as a product of two operands plus something; None if it is none."""
    if func is F.linear or func is torch._C._nn.linear:
        x, w, bias = (args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(_OF_A_LINEAR))
        return F.linear, x, w, bias
    if func in _MATRICES:
        return (torch.bmm if func in (torch.bmm, Tensor.bmm) else torch.matmul), args[0], args[1], None
    if func is torch.addmm:
        return _scaled(*args, **kwargs)
    if func is torch.baddbmm:
        return torch.bmm, args[1], args[2], args[0]
    if func is torch.einsum:
        return _einsum(*args)
    if func in (torch.inner, torch.tensordot):
        return _of_two(lambda left, right: func(left, right, *args[2:], **kwargs), *args[:2])
    if func in (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d):
        return _convolution(func, *args, **kwargs)
    if getattr(func, "__name__", "").split(".")[0] in _GROUPED:
        return _experts(*args, **kwargs)
    return None


_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")


def _experts(x: Tensor, w: Tensor, offs: Tensor | None = None, **_: Any) -> Product | None:
    """Tokens times experts; ``offs`` says where each expert's tokens end."""
    if offs is None or (x.dim(), w.dim()) != (2, 3):
        return None

    def multiplied(x: Tensor, w: Tensor) -> Tensor:
        stops = offs.tolist()
        parts = [x[start:stop] @ w[e] for e, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))]
        return torch.cat([*parts, x.new_zeros(x.shape[0] - stops[-1], w.shape[2])])

    return multiplied, x, w, None


def _scaled(added: Tensor, x: Tensor, w: Tensor, beta: float = 1, alpha: float = 1) -> Product:
    return (lambda x, w: alpha * torch.mm(x, w)), x, w, added if beta == 1 else beta * added


def _einsum(equation: str, *operands: Tensor) -> Product | None:
    return _of_two(lambda *both: torch.einsum(equation, *both), *operands) if len(operands) == 2 else None


def _of_two(call: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Product:
    """A product of an activation and a weight, whichever comes first."""
    if isinstance(right, nn.Parameter):
        return call, left, right, None
    return (lambda x, w: call(w, x)), right, left, None


def _convolution(
    func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **named: Any
) -> Product:
    added = None if bias is None else bias.view(-1, *[1] * (weight.dim() - 2))
    return (lambda x, w: func(x, w, None, *more, **named)), input, weight, added


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, scales: Scales, what: str, each: bool) -> Tensor:
        ctx.dtype = t.dtype
        return scales.rounded(t, FORWARD, what, each)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None, None, None


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, scales: Scales, what: str, each: bool) -> Tensor:
        ctx.scales, ctx.what, ctx.each = scales, what, each
        return t.clone()  # a view made here could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.scales.rounded(grad, BACKWARD, ctx.what, ctx.each), None, None, None
