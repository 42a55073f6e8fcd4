"""What stands around linears: norms, pointwise operations, views, writes in place and attention, as random steps."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fuzz.draft import Draft

UNARY = (
    "F.gelu({0})", 'F.gelu({0}, approximate="tanh")', "F.silu({0})", "F.relu({0})", "F.relu({0}).square()",
    "torch.tanh({0})", "torch.sigmoid({0})", "{0} * torch.sigmoid(1.702 * {0})", "F.softplus({0})", "F.elu({0})",
    "F.leaky_relu({0}, 0.1)", "F.hardswish({0})", "F.mish({0})", "F.softmax({0}, dim=-1)", "-{0}", "{0}.abs()",
    "{0} * 0.5", "2.0 * {0} + 1.0", "1.0 - {0}", "{0} / 3", "{0}.clamp(-1.0, 1.0)", "{0}.clamp(min=-0.5)",
    "torch.where({0} > 0, {0}, 0.1 * {0})", "{0}.masked_fill({0} < -1.0, 0.0)", "{0}.pow(2)", "{0}.sin()",
    "torch.exp(-{0}.abs())", "{0}.neg().exp().add(1.0).reciprocal()", "F.dropout({0}, 0.0)",
    "F.dropout({0}, 0.3, training=False)", "30.0 * torch.tanh({0} / 30.0)", "{0}.float()", "{0}.to(torch.bfloat16)",
    "{0}.to(torch.float16).float()", "{0}.detach()", "{0}.clone()", "torch.log1p({0}.abs())", "{0}.contiguous()",
    "0.5 * {0} * (1.0 + torch.erf({0} / 2.0**0.5))", "{0}.float().to({0}.dtype)", "{0}.add({0}, alpha=0.5)",
    "torch.addcmul({0}, {0}, {0}, value=0.1)", "torch.lerp({0}, {0}.tanh(), 0.3)", "{0}.type_as({0})",
    "{0} * {0}.mean(dim=-1, keepdim=True)", "F.normalize({0}, dim=-1)", "torch.nan_to_num({0})", "{0}.rsub(1.0)",
    "{0}.sum(0, keepdim=True) * 0.1 + {0}", "torch.maximum({0}, {0}.flip(-1))", "{0}.round() * 0.1 + {0}",
)  # fmt: skip

BINARY = (
    "{0} + {1}", "{0} + {1}", "{1} + {0}", "{0} * {1}", "F.silu({0}) * {1}", "F.gelu({0}) * {1}", "{0} - {1}",
    "torch.sigmoid({0}) * {1}", "torch.where({0} > {1}, {0}, {1})", "torch.maximum({0}, {1})",
    "{0} / (1.0 + {1}.abs())", "torch.add({0}, {1}, alpha=0.5)", "torch.cat([{0}, {1}], dim=-1)",
    "torch.cat([{0}, {1}])", "torch.stack([{0}, {1}])",
    "torch.lerp({0}, {1}, 0.25)", "{0} + {1}.detach()", "{0} * torch.tanh({1}) + {1}",
    "torch.addcmul({0}, {1}, {0}, value=0.5)", "F.dropout({0}, 0.0) + {1}", "{0}.float() + {1}.float()",
    "{0} + {1}.to({0}.dtype)",
)  # fmt: skip


def add_unary(draft: Draft) -> None:
    x = draft.pick(lambda v: v.dim() >= 1)  # of one number the last bits may be all that there is to compare
    if x is not None:
        draft.step(f"{{o0}} = {draft.random.choice(UNARY)}", x)


def add_binary(draft: Draft) -> None:
    x = draft.pick()
    other = draft.partner(x) if x is not None else None
    if x is not None and other is not None:
        draft.step(f"{{o0}} = {draft.random.choice(BINARY)}", x, other)


def add_scale_or_shift(draft: Draft) -> None:
    """A vector or a scalar of the module: layer scale, gains, position embeddings."""
    x = draft.pick(lambda v: v.dim() >= 2)
    if x is None:
        return
    shape, name = draft.of(x).shape, draft.fresh("p")
    size = draft.random.choice([shape[-1:], shape[-2:], (1,), ()])
    made = draft.parameter(name, *size) if size else [f"self.{name} = nn.Parameter(torch.tensor(0.7))"]
    draft.step(f"{{o0}} = {{0}} {draft.one_of('*', '+')} self.{name}", x, init=made)


def add_gate(draft: Draft) -> None:
    """Both halves of the last dimension, or its even and odd places."""
    x = draft.pick(lambda v: v.dim() >= 2 and v.shape[-1] % 2 == 0 and v.shape[-1] >= 32)
    if x is None:
        return
    halves = draft.one_of("{0}.chunk(2, -1)", "({0}[..., ::2], {0}[..., 1::2])", "{0}.split({0}.shape[-1] // 2, -1)")
    gate = draft.one_of(
        "F.silu(a) * b", "a * F.gelu(b)", "a * torch.sigmoid(b)", "a.clamp(max=1.0) * (b + 1.0)", "b * F.relu(a)",
        "torch.cat([-b, a], dim=-1)",
    )  # fmt: skip
    draft.step(draft.one_of(f"a, b = {halves}\n{{o0}} = {gate}", "{o0} = F.glu({0}, -1)"), x)


def add_modulation(draft: Draft) -> None:
    """A linear makes a scale, a shift and a gate for each sample, as in diffusion transformers."""
    x = draft.pick(lambda v: v.dim() == 3 and v.shape[-1] >= 16)
    if x is None:
        return
    size, name = draft.of(x).shape[-1], draft.fresh("fc")
    condition = draft.one_of("{0}.mean(1)", "F.silu({0}[:, 0])", "{0}.mean(1, keepdim=True)")
    kept = "" if "keepdim" in condition else "[:, None]"
    use = draft.one_of(
        "{0} * (1.0 + a) + b", "{0} + b", "torch.addcmul(b, {0}, a + 1.0)", "b - {0} * a", "torch.sigmoid(a) * {0}",
        "F.layer_norm({0}, ({0}.shape[-1],)) * (1.0 + a) + b", "F.gelu(b + {0}) * a", "{0}.add(b)",
    )  # fmt: skip
    if draft.chance(0.5):
        made = [f"self.{name} = nn.Linear({size}, {2 * size}{draft.module_kind()})"]
        code = f"a, b = self.{name}({condition}){kept}.chunk(2, -1)"
    else:
        made = [f"self.{each} = nn.Linear({size}, {size}{draft.module_kind()})" for each in (name, f"{name}_b")]
        code = f"a, b = self.{name}({condition}){kept}, self.{name}_b({condition}){kept}"
    draft.step(f"{code}\n{{o0}} = {use}", x, init=made)


def add_loss(draft: Draft) -> None:
    """Cross entropy of logits, which the program may give back as well."""
    x = draft.pick(lambda v: v.dim() >= 2 and v.shape[-1] >= 16, recent=0.9)
    if x is None:
        return
    classes = draft.of(x).shape[-1]
    logits = draft.one_of("{0}", "{0}.float()") + draft.one_of(f".reshape(-1, {classes})", ".flatten(0, -2)")
    more = draft.one_of("", "", ", ignore_index=3", ", label_smoothing=0.1", ', reduction="sum"', ', reduction="none"')
    loss = draft.one_of(
        f"F.cross_entropy(z, t{more})", f"F.cross_entropy(z, t{more})", "F.nll_loss(F.log_softmax(z, dim=-1), t)",
        f"F.cross_entropy(z, t{more}).mean() + 0.01 * torch.logsumexp(z, -1).square().mean()",
    )  # fmt: skip
    draft.step(f"z = {logits}\nt = torch.arange(z.shape[0], device=z.device) * 7 % {classes}\n{{o0}} = {loss}", x)


def add_norm(draft: Draft) -> None:
    """LayerNorm and RMSNorm in several spellings."""
    x = draft.pick(lambda v: v.dim() >= 2 and v.shape[-1] >= 8)
    if x is None:
        return
    size, name = draft.of(x).shape[-1], draft.fresh("g")
    gain, shift = draft.parameter(name, size), draft.parameter(f"{name}_bias", size)
    g, b, kind = f"self.{name}", f"self.{name}_bias", draft.module_kind()
    rms = "h = {0}.float()\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)\n"
    mean = "h = {0} - {0}.mean(-1, keepdim=True)\n"
    choices: list[tuple[str, list[str]]] = [
        (f"{{o0}} = {g}({{0}})", [f"{g} = nn.LayerNorm({size}{kind})"]),
        (f"{{o0}} = {g}({{0}})", [f"{g} = nn.LayerNorm({size}, bias=False{kind})"]),
        (f"{{o0}} = {g}({{0}})", [f"{g} = nn.LayerNorm({size}, elementwise_affine=False{kind})"]),
        (f"{{o0}} = {g}({{0}})", [f"{g} = nn.RMSNorm({size}{kind})"]),
        (f"{{o0}} = {g}({{0}})", [f"{g} = nn.RMSNorm({size}, eps=1e-5, elementwise_affine=False{kind})"]),
        (f"{{o0}} = F.layer_norm({{0}}, ({size},), {g}, {b})", gain + shift),
        (f"{{o0}} = F.layer_norm({{0}}, ({size},), {g} + 1.0, {b}, 1e-4)", gain + shift),
        (f"{{o0}} = F.rms_norm({{0}}, ({size},), {g}, 1e-6)", gain),
        (f"{rms}{{o0}} = {g} * h.to({{0}}.dtype)", gain),
        (f"{rms}{{o0}} = h.to({{0}}.dtype) * {g}", gain),
        (f"{rms}{{o0}} = (h * (1.0 + {g}.float())).type_as({{0}})", gain),
        (f"{rms}{{o0}} = ({g} * h).to({{0}}.dtype)", gain),
        (f"{rms}{{o0}} = h.to({{0}}.dtype)", []),
        (f"v = {{0}}.float().pow(2).mean(-1, keepdim=True)\n{{o0}} = {g} * ({{0}} * torch.rsqrt(v + 1e-6))", gain),
        (f"v = {{0}}.pow(2).mean(-1, keepdim=True)\n{{o0}} = {g} * {{0}} * (v + 1e-6).pow(-0.5)", gain),
        (f"{mean}v = h.pow(2).mean(-1, keepdim=True)\n{{o0}} = {g} * (h * torch.rsqrt(v + 1e-5)) + {b}", gain + shift),
        (f"{mean}v = h.pow(2).mean(-1, keepdim=True)\n{{o0}} = {g} * (h / torch.sqrt(v + 1e-5))", gain),
        ("v = {0}.var(-1, keepdim=True)\n{o0} = ({0} - {0}.mean(-1, keepdim=True)) * torch.rsqrt(v + 1e-5)", []),
        ("{o0} = {0} * torch.rsqrt({0}.pow(2).sum(-1, keepdim=True) + 1e-6)", []),
    ]  # fmt: skip
    code, made = draft.random.choice(choices)
    draft.step(code, x, init=made)


def add_view(draft: Draft) -> None:
    x = draft.pick(lambda v: v.dim() >= 1, recent=0.8)
    if x is None:
        return
    value = draft.of(x)
    d, last = value.dim(), value.shape[-1]
    half = max(last // 2, 1)
    first, other = draft.random.randrange(d), draft.random.randrange(d)
    code = draft.one_of(
        "{0}.reshape(-1, {0}.shape[-1])", "{0}.flatten(0, -2)", "{0}.flatten(1)", f"{{0}}.transpose({first}, {other})",
        f"{{0}}.transpose({first}, {other}).contiguous()", "{0}.unsqueeze(0)", "{0}.unsqueeze(1)", "{0}.squeeze(0)",
        "{0}.mT", f"{{0}}[..., :{half}]", "{0}[:1]", "{0}[-1]", "{0}[:, 0]", "{0}[:, :1]", "{0}[:, 1:]",
        f"{{0}}.roll(1, {first})",
        f"{{0}}.flip({first})", "{0}.expand(2, *{0}.shape)", "{0}[None].expand(3, *{0}.shape).contiguous()",
        f"{{0}}.repeat({', '.join(['2'] + ['1'] * (d - 1))})", f"{{0}}.mean({first}, keepdim=True)",
        f"{{0}}.mean({first})", f"{{0}}.sum({first}) * 0.3", f"{{0}}.unflatten(-1, (2, {half}))",
        f"{{0}}.unflatten(-1, (2, {half})).transpose(-2, -3)", f"{{0}}.unflatten(-1, ({half}, 2)).flatten(-2)",
        f"F.pad({{0}}, (0, {draft.one_of(4, 8, 16)}))", f"F.pad({{0}}, (0, -{draft.one_of(1, 4)}))",
        f"{{0}}.narrow(-1, 0, {half})", f"{{0}}.view({', '.join(map(str, value.shape))})", "{0}.movedim(0, -1)",
        f"{{0}}.index_select({first}, torch.arange({value.shape[first]} - 1, -1, -1, device={{0}}.device))",
        f"{{0}}.cumsum({first}) * 0.3",
        f"{{0}}.permute({', '.join(map(str, draft.random.sample(range(d), d)))})", "{0}.reshape({0}.shape)",
        f"torch.cat([{{0}}[..., {half}:], {{0}}[..., :{half}]], dim=-1)", f"{{0}}.amax({first}, keepdim=True)",
    )  # fmt: skip
    draft.step(f"{{o0}} = {code}", x)


def add_write(draft: Draft) -> None:
    """Something is changed in place: a variable, or a buffer of the module."""
    x = draft.pick(lambda v: v.dim() >= 1)
    if x is None:
        return
    other, value = draft.partner(x), draft.of(x)
    alone = (
        "{0}.mul_(0.5)\n{o0} = {0}", "{o0} = {0}.add_(1.0)", "{o0} = {0}.relu_()", "{o0} = {0}.clamp_(-1.0, 1.0)",
        "{0}[..., :4] = 0.0\n{o0} = {0}", "{o0} = F.relu({0}, inplace=True)", "{o0} = {0}.masked_fill_({0} > 1.0, 0.5)",
        "h = {0}.clone()\nh[..., :2] = h[..., 2:4]\n{o0} = h", "h = {0} * 1.0\nh[0] = 0.0\n{o0} = h",
        "h = {0}.clone()\nh *= 2.0\n{o0} = h", "h = torch.zeros_like({0})\nh[..., ::2] = {0}[..., ::2]\n{o0} = h",
        "h = {0}.clone()\nh.transpose(0, -1).mul_(0.5)\n{o0} = h", "h = torch.empty_like({0})\nh.copy_({0})\n{o0} = h",
        "h = {0}.clone()\nh[..., 0].zero_()\n{o0} = h + {0}",
        "h = {0}.contiguous()\nh.view(-1)[:3].mul_(2.0)\n{o0} = h",
    )  # fmt: skip
    paired = (
        "{o0} = {0}.add_({1})", "{0} += {1}\n{o0} = {0}", "{o0} = {0}.mul_({1})",
        "{0}[..., :2] = {1}[..., :2]\n{o0} = {0}",
        "{0} *= torch.sigmoid({1})\n{o0} = {0}", "{o0} = {0}.copy_({1})",
        "h = {0}.clone()\nh[..., 1:] += {1}[..., 1:]\n{o0} = h",
        "h = {0}.clone()\nh.add_({1}, alpha=0.5)\n{o0} = h", "h = {0}.clone()\nh.copy_({1})\n{o0} = h * {0}",
    )  # fmt: skip
    way = draft.random.random()
    if way < 0.45:
        draft.step(draft.random.choice(alone), x, effect=True)
    elif way < 0.75 and other is not None:
        draft.step(draft.random.choice(paired), x, other, effect=True)
    else:
        _write_to_buffer(draft, x, value)


def _write_to_buffer(draft: Draft, x: str, value: Tensor) -> None:
    name = draft.fresh("buffer")
    shape = ", ".join(map(str, value.shape)) + ("," if value.dim() == 1 else "")
    made = [f'self.register_buffer("{name}", torch.zeros(({shape})))']
    own = f"self.{name}"
    code = draft.one_of(
        f"{own}.copy_({{0}}.detach())\n{{o0}} = {{0}} + {own}", f"{own}.add_({{0}}.detach())\n{{o0}} = {{0}}",
        f"{{o0}} = {{0}} * ({own} + 1.0)\n{own} += 0.5",
        f"{own}.mul_(0.9).add_({{0}}.detach(), alpha=0.1)\n{{o0}} = {{0}} * 1.0",
        f"{{o0}} = {{0}} - {own}\n{own}[..., :1] = {{0}}.detach()[..., :1]",
        f"{own}.lerp_({{0}}.detach().float(), 0.1)\n{{o0}} = {{0}} - {own}",
    )  # fmt: skip
    draft.step(code, x, init=made, effect=True)


def add_batch_norm(draft: Draft) -> None:
    """Running statistics: the one norm that writes."""
    x = draft.pick(lambda v: v.dim() in (2, 3) and v.shape[0] > 1)
    if x is None:
        return
    name = draft.fresh("norm")
    made = [f"self.{name} = nn.BatchNorm1d({draft.of(x).shape[1]}{draft.module_kind()})"]
    draft.step(f"{{o0}} = self.{name}({{0}})", x, init=made, effect=True)


def add_attention(draft: Draft) -> None:
    """Projections to heads, a product with or without a mask, the way back."""
    x = draft.pick(lambda v: v.dim() == 3 and v.shape[-1] >= 16 and v.shape[1] >= 2)
    if x is None:
        return
    batch, length, k = draft.of(x).shape
    heads, size = draft.one_of((2, 8), (2, 16), (1, 16), (4, 8))
    groups = draft.one_of(heads, heads, 1)
    name, kind = draft.fresh("q"), draft.module_kind()
    made = [
        f"self.{name}_{each} = nn.Linear({k}, {n * size}, bias={draft.one_of(True, False)}{kind})"
        for each, n in zip("qkv", (heads, groups, groups), strict=True)
    ]
    names: list[str] = []
    for line, n in zip(made, (heads, groups, groups), strict=True):
        module = line.split(" ")[0]
        code = draft.one_of(
            f"{{o0}} = {module}({{0}}).view(*{{0}}.shape[:2], {n}, {size}).transpose(1, 2)",
            f"{{o0}} = {module}({{0}}).unflatten(-1, ({n}, -1)).permute(0, 2, 1, 3)",
        )
        names += draft.step(code, x, init=[line])
    if len(names) != 3:
        return
    if groups != heads:
        again = draft.one_of(
            f"{{o0}} = {{0}}.repeat_interleave({heads}, dim=1)",
            f"{{o0}} = {{0}}[:, :, None].expand(-1, -1, {heads}, -1, -1).reshape(-1, {heads}, {length}, {size})",
        )
        for i in (1, 2):
            names[i] = (draft.step(again, names[i]) or names[i : i + 1])[0]
    attended = _attend(draft, names, batch, length, size)
    if attended:
        tail = draft.one_of(
            f".transpose(1, 2).reshape({{0}}.shape[0], -1, {heads * size})", ".transpose(1, 2).flatten(2)"
        )
        back = draft.step("{o0} = {0}" + tail, *attended)
        if back:
            out = draft.fresh("out")
            draft.step(
                f"{{o0}} = self.{out}({{0}}) + {{1}}",
                *back,
                x,
                init=[f"self.{out} = nn.Linear({heads * size}, {k}{kind})"],
            )


def _attend(draft: Draft, names: list[str], batch: int, length: int, size: int) -> tuple[str, ...]:
    reads, mask = list(names), draft.one_of("none", "causal", "bool", "float", "tril")
    if mask == "bool":
        reads.append(draft.add_input((batch, 1, length, length), torch.bool))
        keep = f"({{3}} | torch.eye({length}, dtype=torch.bool, device={{0}}.device))"
    elif mask == "tril":
        keep = f"torch.ones({length}, {length}, dtype=torch.bool, device={{0}}.device).tril()"
    elif mask == "float":
        keep = f"torch.linspace(-1.0, 1.0, {length}, dtype={{0}}.dtype, device={{0}}.device)[None, :]"
    else:
        keep = ""
    if draft.chance(0.5):
        given = {"none": "", "causal": ", is_causal=True"}.get(mask, f", attn_mask={keep}")
        given = f", attn_mask={keep}.expand({length}, {length})" if mask == "float" else given
        scale = draft.one_of("", "", ", scale=0.3")
        return draft.step(f"{{o0}} = F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}{given}{scale})", *reads)
    product = draft.one_of(
        f"{{0}} @ {{1}}.transpose(-2, -1) * {size**-0.5}", f"torch.matmul({{0}}, {{1}}.mT) / {size}**0.5",
        f'torch.einsum("bhqd,bhkd->bhqk", {{0}}, {{1}}) * {size**-0.5}', f"({{0}} * {size**-0.5}) @ {{1}}.mT",
    )  # fmt: skip
    lines = [f"s = {product}"]
    if mask == "causal":
        below = f"torch.full(({length}, {length}), -10000.0, dtype=s.dtype, device=s.device)"
        lines.append(f"s = s + {below}.triu(1)")
    elif mask == "float":
        lines.append(f"s = s + {keep}")
    elif keep:
        fill = draft.one_of('float("-inf")', "-10000.0")
        lines.append(
            draft.one_of(f"s = s.masked_fill(~{keep}, {fill})", f"s = torch.where({keep}, s, s.new_tensor({fill}))")
        )
    if draft.chance(0.2):
        lines.append("s = 5.0 * torch.tanh(s / 5.0)")
    lines.append(draft.one_of("p = s.softmax(-1)", "p = F.softmax(s, dim=-1, dtype=torch.float32).to({2}.dtype)"))
    products = (
        "p @ {2}",
        "F.dropout(p, 0.0) @ {2}",
        "torch.matmul(p, {2})",
        "({2}.mT @ p.transpose(2, 3).contiguous()).mT",
    )
    lines.append("{o0} = " + draft.one_of(*products))
    return draft.step("\n".join(lines), *reads)


def add_graph_break(draft: Draft) -> None:
    x = draft.pick()
    if x is not None and not draft.block:
        draft.step("torch._dynamo.graph_break()\n{o0} = {0}", x)
