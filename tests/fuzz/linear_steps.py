"""Every way in which a model may write a linear, as steps of a random program."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.fuzz.draft import Draft

SIZES = (16, 16, 32, 32, 48, 64, 24, 40, 20, 17, 8)
"""Features: multiples of 16, others that are padded, and one that is too narrow."""

Form = Callable[[Draft, str, int], object]
"""Adds a linear of the variable to the draft; the number is the last size of the variable."""


def add_linear(draft: Draft) -> None:
    """One linear in one of its forms."""
    x = draft.pick(lambda value: value.dim() >= 2 and value.shape[-1] >= 16)
    if x is not None:
        draft.one_of(*FORMS)(draft, x, draft.of(x).shape[-1])


def features(draft: Draft, in_features: int) -> int:
    """Out features; often as many as in, so that residual sums can follow."""
    return in_features if draft.chance(0.45) else draft.one_of(*SIZES)


def weight(draft: Draft, n: int, k: int, scale_by: int | None = None) -> tuple[str, list[str]]:
    """The name of a new matrix and the line that makes it."""
    name = draft.fresh("w")
    return name, draft.parameter(name, n, k, scale=f" / {scale_by or k}**0.5")


def bias(draft: Draft, n: int) -> tuple[str, list[str]]:
    """``None``, or the name of a new vector with ``self.`` and the line that makes it."""
    if draft.chance(0.4):
        return "None", []
    name = draft.fresh("b")
    return f"self.{name}", draft.parameter(name, n)


def function(draft: Draft, x: str, k: int) -> None:
    n = features(draft, k)
    w, made = weight(draft, n, k)
    b, also = bias(draft, n)
    if draft.step(f"{{o0}} = F.linear({{0}}, self.{w}, {b})", x, init=made + also):
        draft.linears.append((w, made[0], (n, k)))


def module(draft: Draft, x: str, k: int) -> None:
    n, name = features(draft, k), draft.fresh("fc")
    has_bias = "" if draft.chance(0.6) else ", bias=False"
    made = [f"self.{name} = nn.Linear({k}, {n}{has_bias}{draft.module_kind()})"]
    draft.step(f"{{o0}} = self.{name}({{0}})", x, init=made)


def product(draft: Draft, x: str, k: int) -> None:
    """``x @ w`` with the weight stored either way."""
    n = features(draft, k)
    if draft.chance(0.5):
        w, made = weight(draft, k, n, k)
        operand = f"self.{w}"
    else:
        w, made = weight(draft, n, k)
        view = draft.one_of(
            "t()", "T", "mT", "transpose(0, 1)", "transpose(-1, -2)", "permute(1, 0)", "t().contiguous()"
        )
        operand = f"self.{w}.{view}"
        draft.linears.append((w, made[0], (n, k)))
    call = draft.one_of(f"{{0}} @ {operand}", f"torch.matmul({{0}}, {operand})", f"{{0}}.matmul({operand})")
    if draft.of(x).dim() == 2 and draft.chance(0.4):
        call = f"torch.mm({{0}}, {operand})"
    tail = draft.one_of("", "", f" + self.{w}_bias")
    more = draft.parameter(f"{w}_bias", n) if tail else []
    draft.step(f"{{o0}} = {call}{tail}", x, init=made + more)


def left(draft: Draft, x: str, k: int) -> None:
    """``w @ x`` of tokens that lie behind their features."""
    n = features(draft, k)
    if draft.chance(0.6):
        w, made = weight(draft, n, k)
        operand = f"self.{w}"
        draft.linears.append((w, made[0], (n, k)))
    else:
        w, made = weight(draft, k, n, k)
        operand = f"self.{w}.t()"
    turned = draft.one_of("{0}.mT", "{0}.flatten(0, -2).t()", "{0}.mT.contiguous()")
    tail = draft.one_of(".mT", ".mT", f" + self.{w}_bias", "")
    more = draft.parameter(f"{w}_bias", n, 1) if "bias" in tail else []
    call = draft.one_of(f"({operand} @ {turned})", f"torch.matmul({operand}, {turned})")
    draft.step(f"{{o0}} = {call}{tail}", x, init=made + more)


def addmm(draft: Draft, x: str, k: int) -> None:
    """Hugging Face's Conv1D, or with more than its bias added."""
    n, name = features(draft, k), draft.fresh("w")
    sizes, factors = draft.one_of(((n,), ""), ((n,), ""), ((1, n), ""), ((1, 1), ", beta=0.5"), ((n,), ", alpha=-2"))
    made = draft.parameter(name, k, n, scale=f" / {k}**0.5") + draft.parameter(f"{name}_bias", *sizes)
    view = draft.one_of("view", "reshape")
    code = f"{{o0}} = torch.addmm(self.{name}_bias, {{0}}.{view}(-1, {k}), self.{name}{factors})"
    if draft.of(x).dim() > 2:
        code += f".{view}(*{{0}}.shape[:-1], {n})"
    draft.step(code, x, init=made)


def dotted(draft: Draft, x: str, k: int) -> None:
    """An einsum by another name."""
    n = features(draft, k)
    stored_kn = draft.chance(0.5)
    w, made = weight(draft, *((k, n, k) if stored_kn else (n, k)))
    calls = (f"tensordot({{0}}, self.{w}, 1)", f"tensordot({{0}}, self.{w}, dims=([-1], [0]))")
    if not stored_kn:
        calls = (f"inner({{0}}, self.{w})", f"tensordot({{0}}, self.{w}, ([{draft.of(x).dim() - 1}], [1]))")
        draft.linears.append((w, made[0], (n, k)))
    draft.step(f"{{o0}} = torch.{draft.one_of(*calls)}", x, init=made)


def packed(draft: Draft, x: str, k: int) -> None:
    """One product whose result is split, or one weight that is split."""
    parts, n = draft.one_of(2, 3), features(draft, k)
    w, made = weight(draft, parts * n, k)
    b, also = bias(draft, parts * n)
    names = ", ".join(f"{{o{i}}}" for i in range(parts))
    way = draft.random.randrange(4)
    if way == 0:
        code = f"{names} = F.linear({{0}}, self.{w}, {b}).chunk({parts}, -1)"
    elif way == 1:
        code = f"{names} = F.linear({{0}}, self.{w}, {b}).split({n}, dim=-1)"
    elif way == 2:
        code = "\n".join(f"{{o{i}}} = F.linear({{0}}, self.{w}[{i * n}:{(i + 1) * n}])" for i in range(parts))
    else:
        code = f"w = self.{w}.chunk({parts})\n" + "\n".join(f"{{o{i}}} = F.linear({{0}}, w[{i}])" for i in range(parts))
    draft.step(code, x, init=made + also * (way < 2), makes=parts)


def packed_heads(draft: Draft, x: str, k: int) -> None:
    """``[…, 3, heads, head size]`` and its like, unbound."""
    heads, size = draft.one_of((2, 16), (3, 16), (4, 8), (2, 12))
    w, made = weight(draft, 3 * heads * size, k)
    code = f"{{o0}}, {{o1}}, {{o2}} = F.linear({{0}}, self.{w}).unflatten(-1, (3, {heads}, {size})).unbind(-3)"
    draft.step(code, x, init=made, makes=3)


def einsum(draft: Draft, x: str, k: int) -> None:
    n, dimensions = features(draft, k), draft.of(x).dim()
    rows = "abc"[: dimensions - 1]
    forms = [(f"{rows}k,kn->{rows}n", (k, n)), (f"{rows}k,nk->{rows}n", (n, k)), ("...k,nk->...n", (n, k))]
    forms += [(f"{rows}k,nk->n{rows}", (n, k)), (f"{rows}k,khd->{rows}hd", (k, 2, 16))]
    if dimensions >= 3 and draft.of(x).shape[-2] in (2, 3, 4):
        h = draft.of(x).shape[-2]
        forms += [(f"{rows}k,{rows[-1]}kn->{rows[:-1]}n", (h, k, n))] * 3
    equation, shape = draft.random.choice(forms)
    name = draft.fresh("w")
    made = draft.parameter(name, *shape, scale=f" / {k}**0.5")
    operands = f"{{0}}, self.{name}"
    if draft.chance(0.2):
        left, right = equation.split("->")
        equation = ",".join(reversed(left.split(","))) + "->" + right
        operands = f"self.{name}, {{0}}"
    draft.step(f'{{o0}} = torch.einsum("{equation}", {operands})', x, init=made)


def convolution(draft: Draft, x: str, k: int) -> None:
    """Kernel 1 over channels, on a tensor of its own order or with its channels moved."""
    n, dimensions, name = features(draft, k), draft.of(x).dim(), draft.fresh("conv")
    has_bias = draft.one_of("", ", bias=False")
    spatial = dimensions - 2
    if spatial not in (1, 2):
        return
    made = [f"self.{name} = nn.Conv{spatial}d({k}, {n}, 1{has_bias}{draft.module_kind()})"]
    back = draft.one_of("", ".movedim(1, -1)")
    draft.step(f"{{o0}} = self.{name}({{0}}.movedim(-1, 1)){back}", x, init=made)


def patches(draft: Draft, x: str, k: int) -> None:
    """A convolution whose patches stand side by side."""
    image = draft.pick(lambda v: v.dim() == 4 and v.shape[-1] % 4 == 0 and v.shape[-2] % 2 == 0 and v.shape[1] >= 2)
    if image is None:
        return
    channels, n, name = draft.of(image).shape[1], draft.one_of(16, 32, 24), draft.fresh("conv")
    kernel = draft.one_of((2, 4), (2, 2), (2, 4))
    made = [f"self.{name} = nn.Conv2d({channels}, {n}, {kernel}, stride={kernel}{draft.module_kind()})"]
    draft.step(f"{{o0}} = self.{name}({{0}}).flatten(2).transpose(1, 2)", image, init=made)


def expression(draft: Draft, x: str, k: int) -> None:
    """A weight that is made from a parameter."""
    n = features(draft, k)
    w, made = weight(draft, n, k)
    kind = draft.random.randrange(13)
    own = f"self.{w}"
    texts = [
        f"({own} + 1.0)", f"{own} * self.{w}_mask", f"{own}.masked_fill(self.{w}_mask == 0, 0.0)", f"{own} * 0.5",
        f"torch.tanh({own})", f"{own} * self.{w}_gain", f"({own} - {own}.mean(dim=1, keepdim=True))",
        f"F.normalize({own}, dim=-1)", f"torch.cat([{own}[:8], {own}[8:]])", f"{own}.clone()",
        f"{own}.view({n}, {k})", f"{own}.detach()", f"({own} + self.{w}_up @ self.{w}_down)",
    ]  # fmt: skip
    if kind in (1, 2):
        made = [*made, f'self.register_buffer("{w}_mask", (torch.rand({n}, {k}) < 0.8).to({draft.dtype}))']
    if kind == 5:
        made = made + draft.parameter(f"{w}_gain", n, 1)
    if kind == 12:
        factors = draft.parameter(f"{w}_up", n, 16, scale=" / 16"), draft.parameter(f"{w}_down", 16, k, scale=" / 16")
        made = [line for lines in (made, *factors) for line in lines]
    b, also = bias(draft, n)
    draft.step(f"{{o0}} = F.linear({{0}}, {texts[kind]}, {b})", x, init=made + also)


def experts(draft: Draft, x: str, k: int) -> None:
    """One matrix for each slice of a batch, or one picked from a stack."""
    n, name = features(draft, k), draft.fresh("w")
    value = draft.of(x)
    if value.dim() == 3 and value.shape[0] <= 4 and draft.chance(0.7):
        made = draft.parameter(name, value.shape[0], k, n, scale=f" / {k}**0.5")
        way = draft.random.randrange(4)
        if way == 0:
            made += draft.parameter(f"{name}_bias", value.shape[0], 1, n)
        codes = [
            f"torch.baddbmm(self.{name}_bias, {{0}}, self.{name})", f"torch.bmm({{0}}, self.{name})",
            f"{{0}} @ self.{name}", f"torch.matmul({{0}}, self.{name})",
        ]  # fmt: skip
        draft.step(f"{{o0}} = {codes[way]}", x, init=made)
        return
    made = draft.parameter(name, 2, k, n, scale=f" / {k}**0.5")
    draft.step(f"{{o0}} = {{0}} @ self.{name}[0] + {{0}} @ self.{name}[1]", x, init=made)


def shared(draft: Draft, x: str, k: int) -> None:
    """A weight that another linear has too, forward or transposed."""
    fitting = [(name, line, shape) for name, line, shape in draft.linears if k in shape]
    if not fitting:
        return
    name, line, (_, other) = draft.random.choice(fitting)
    operand = f"self.{name}" if other == k else f"self.{name}.t()"
    draft.step(f"{{o0}} = F.linear({{0}}, {operand})", x, init=[line])


def tied(draft: Draft, x: str, k: int) -> None:
    """An embedding's weight that is a projection's as well."""
    ids = next((each.name for each in draft.inputs if each.dtype.is_signed and not each.dtype.is_floating_point), None)
    ids = ids or draft.add_input((3,), torch.int64)
    w, made = weight(draft, 16, k)
    code = f"{{o0}} = F.linear({{0}} + F.embedding({{1}}, self.{w}).mean(0), self.{w})"
    draft.step(code, x, ids, init=made)


def torch_attention(draft: Draft, x: str, k: int) -> None:
    """torch.nn's own attention, whose linears are inside."""
    if draft.of(x).dim() not in (2, 3) or k % 4:
        return
    name = draft.fresh("attention")
    more = draft.one_of("", "", ", bias=False", ", add_bias_kv=True", ", add_zero_attn=True")
    made = [f"self.{name} = nn.MultiheadAttention({k}, 2, batch_first=True{more}{draft.module_kind()})"]
    weights = draft.one_of(", need_weights=False", "")
    draft.step(f"{{o0}} = self.{name}({{0}}, {{0}}, {{0}}{weights})[0]", x, init=made)


FORMS: tuple[Form, ...] = (
    function, function, module, module, product, product, left, addmm, dotted, packed, packed_heads, einsum,
    convolution, patches, expression, experts, shared, tied, torch_attention,
)  # fmt: skip
