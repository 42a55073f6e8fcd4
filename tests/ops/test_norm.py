"""``te::norm`` gives the bits of the modules it stands for, and gradients at least as good as theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_compile.ops.norm import KINDS, NORM, NORM_FORWARD, norm_reference
from te_compile.ops.norm_quantize import NORM_QUANTIZE
from te_compile.ops.quantize import quantize_reference
from te_compile.recipe import ScaleRule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULE = ScaleRule().text()
EPS = 1e-6


def hugging_face(path: str) -> Callable[[int], nn.Module]:
    module, _, name = path.rpartition(".")
    loaded = pytest.importorskip(f"transformers.models.{module}")
    return lambda columns: getattr(loaded, name)(columns, eps=EPS)


MODULES: dict[str, tuple[str, Callable[[], Callable[[int], nn.Module]]]] = {
    "LayerNorm": ("layer", lambda: lambda columns: nn.LayerNorm(columns, eps=EPS)),
    "RMSNorm": ("rms_float", lambda: lambda columns: nn.RMSNorm(columns, eps=EPS)),
    "LlamaRMSNorm": ("rms", lambda: hugging_face("llama.modeling_llama.LlamaRMSNorm")),
    "GemmaRMSNorm": ("rms_offset", lambda: hugging_face("gemma.modeling_gemma.GemmaRMSNorm")),
    "T5LayerNorm": ("rms_mixed", lambda: hugging_face("t5.modeling_t5.T5LayerNorm")),
    "Olmo2RMSNorm": ("rms_float", lambda: hugging_face("olmo2.modeling_olmo2.Olmo2RMSNorm")),
    "GptOssRMSNorm": ("rms_float", lambda: hugging_face("gpt_oss.modeling_gpt_oss.GptOssRMSNorm")),
}


def module_of(name: str, columns: int, dtype: torch.dtype) -> tuple[nn.Module, str]:
    """The module with random parameters, and the kind it should be."""
    kind, load = MODULES[name]
    module = load()(columns).to(dtype)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -1, 2)
    return module, kind


def bias_of(module: nn.Module) -> Tensor | None:
    return getattr(module, "bias", None)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_the_bits_are_those_of_the_module(name: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    module, kind = module_of(name, 96, w_dtype)
    if kind == "layer" and w_dtype not in (x_dtype, torch.float32):
        pytest.skip("F.layer_norm refuses these dtypes together on the CPU")
    x = (3 * torch.randn(2, 5, 96)).to(x_dtype)
    want, got = module(x), NORM(x, module.weight, bias_of(module), EPS, kind)
    assert got.dtype == want.dtype
    if kind == "layer" and x_dtype != torch.float32:
        # The CPU's half-precision LayerNorm folds mean and weight into one multiply-add: the last bit may differ.
        torch.testing.assert_close(got, want, rtol=torch.finfo(x_dtype).eps, atol=1e-5)
    else:
        assert torch.equal(got, want)


def truth(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The norm without any rounding, in float64."""
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = (
        centred
        / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
        * (weight + 1 if kind == "rms_offset" else weight)
    )
    return y if bias is None else y + bias


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "dtype, backend",
    (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, "aot_eager"),
        (torch.bfloat16, "aot_eager"),
        (torch.bfloat16, "inductor"),
    ),
)
def test_gradients_are_as_near_the_truth_as_the_module_s_own(
    name: str, dtype: torch.dtype, backend: str | None
) -> None:
    torch._dynamo.reset()
    module, kind = module_of(name, 64, dtype)
    x = torch.randn(3, 7, 64).to(dtype).requires_grad_()
    dy = torch.randn(3, 7, 64).to(dtype)
    inputs = [x, *module.parameters()]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    bias = exact[2] if len(exact) == 3 else None
    wanted = torch.autograd.grad(truth(exact[0], exact[1], bias, kind), exact, dy.double())
    theirs = torch.autograd.grad(module(x), inputs, dy)

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.te.norm(x, weight, bias, EPS, kind)

    run = ours if backend is None else torch.compile(ours, backend=backend, fullgraph=True)
    got = torch.autograd.grad(run(x, module.weight, bias_of(module)), inputs, dy)
    for mine, other, want in zip(got, theirs, wanted, strict=True):
        assert mine.dtype == other.dtype == dtype
        assert distance(mine, want) <= 1.2 * distance(other, want) + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_without_parameters_has_a_gradient(kind: str) -> None:
    x = torch.randn(6, 32, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    ones = torch.zeros(32) if kind == "rms_offset" else torch.ones(32)
    dy = torch.randn(6, 32)
    want = torch.autograd.grad(truth(exact, ones.double(), None, kind), exact, dy.double())[0]
    got = torch.autograd.grad(NORM(x, None, None, EPS, kind), x, dy)[0]
    assert distance(got, want) < 1e-5


def test_gradients_have_the_dtypes_of_what_they_belong_to() -> None:
    x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.randn(32, requires_grad=True) for _ in range(2))
    NORM(x, weight, bias, EPS, "layer").float().square().sum().backward()
    assert [t.grad.dtype for t in (x, weight, bias)] == [torch.bfloat16, torch.float32, torch.float32]


def test_only_wanted_gradients_are_computed() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32, requires_grad=True)
    NORM(x, weight, None, EPS, "rms").sum().backward()
    assert weight.grad is not None and x.grad is None
    x.requires_grad_()
    NORM(x, weight.detach(), None, EPS, "rms").sum().backward()
    assert x.grad is not None
    assert not NORM(x.detach(), weight.detach(), None, EPS, "rms").requires_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fake_predicts_shapes_dtypes_and_strides(kind: str, dtype: torch.dtype) -> None:
    weight = torch.randn(16)
    bias = torch.randn(16) if kind == "layer" else None
    for x in (torch.randn(5, 16), torch.randn(16, 5).t(), torch.randn(0, 16)):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(NORM_FORWARD, (x.to(dtype), weight, bias, EPS, kind), test_utils=checks)
        for rowwise, columnwise, emit in ((True, True, True), (True, False, False), (False, True, False)):
            arguments = (
                x.to(dtype),
                weight,
                bias,
                EPS,
                kind,
                None,
                torch.float8_e4m3fn,
                rowwise,
                columnwise,
                emit,
                RULE,
            )
            torch.library.opcheck(NORM_QUANTIZE, arguments, test_utils=checks)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'rsm': unknown; choose one of layer, rms"):
        norm_reference(torch.randn(2, 4), None, None, EPS, "rsm")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", (None, 0.0, 5.0))
def test_merging_with_the_quantize_changes_no_bit(kind: str, scale: float | None) -> None:
    x, weight = torch.randn(24, 40).bfloat16(), torch.randn(40).bfloat16()
    given = None if scale is None else torch.tensor(scale)
    y, mean, rstd = norm_reference(x, weight, None, EPS, kind)
    quantised = quantize_reference(y, given, torch.float8_e4m3fn, True, True, ScaleRule.parse(RULE))
    got = NORM_QUANTIZE(x, weight, None, EPS, kind, given, torch.float8_e4m3fn, True, True, True, RULE)
    for mine, want in zip(got, (y, *quantised, mean, rstd), strict=True):
        assert mine.dtype == want.dtype
        assert torch.equal(mine.float(), want.float())
