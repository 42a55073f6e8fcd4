"""The loss of a language model on the hardware: the kernels beside the reference, and a model's training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.kernels.cross_entropy import Descent, Walk
from te_compile.kernels.cross_entropy import cross_entropy_backward as backward_kernel
from te_compile.kernels.cross_entropy import cross_entropy_backward_with_sums as sums_kernel
from te_compile.kernels.cross_entropy import cross_entropy_forward as forward_kernel
from te_compile.ops import triton_implementations as kernels
from te_compile.ops.cross_entropy import cross_entropy_backward_reference, cross_entropy_forward_reference
from te_compile.passes import manager
from te_compile.passes.arguments import arguments_of
from tests.compiling import compiled, gradients, know_the_backend, loss_backwards, relative_error, te_nodes
from tests.gpu.test_kernels import poisoned_memory

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device with FP8 conversion (compute capability 8.9 or later)",
)

__all__ = ["poisoned_memory"]  # a fixture that every test here uses

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
IGNORED = -100


def task(rows: int, columns: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which every third is ignored."""
    logits = (3 * torch.randn(rows, columns, device="cuda")).to(dtype)
    targets = torch.randint(0, columns, (rows,), device="cuda")
    targets[1::3] = IGNORED
    return logits, targets


def agrees(logits: Tensor, targets: Tensor, addend: Tensor | None = None, gradients: Tensor | None = None) -> None:
    """Assert losses, logsumexp and gradients of the reference."""
    rows, columns = logits.shape
    found = kernels.cross_entropy_forward(logits, targets, IGNORED)
    wanted = cross_entropy_forward_reference(logits, targets, IGNORED)
    for got, want in zip(found, wanted, strict=True):
        assert (got.shape, got.dtype) == ((rows,), FP32)
        torch.testing.assert_close(got, want, rtol=5e-6, atol=5e-6, equal_nan=True)
    gradients = torch.randn(rows, device="cuda") if gradients is None else gradients
    given = (logits, targets, wanted[1], gradients, IGNORED, addend)
    got, want = kernels.cross_entropy_backward(*given), cross_entropy_backward_reference(*given)
    assert got.is_contiguous() and got.dtype == want.dtype
    eps = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(got, want, rtol=max(2e-5, eps), atol=1e-6, equal_nan=True)
    if logits.dtype != FP32:
        is_class = (targets >= 0) & (targets < columns)
        assert float((got != want)[is_class].float().mean()) < 1e-2, "rounded once, as the reference"


@pytest.mark.parametrize("columns", [1024, 4099, 30528, 32000, 50257, 128256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_reference(dtype: torch.dtype, columns: int) -> None:
    logits, targets = task(257, columns, dtype)
    agrees(logits, targets)
    agrees(logits, targets, torch.randn_like(logits))
    agrees(logits, targets, torch.randn(257, columns, device="cuda"), torch.randn((), device="cuda").expand(257))


@pytest.mark.parametrize("shape", [(1, 1), (1, 200000), (3, 7), (70000, 65), (5, 8193)], ids=str)
def test_shapes_that_fill_nothing_and_more_rows_than_a_grid_is_high(shape: tuple[int, int]) -> None:
    logits, targets = task(*shape)
    agrees(logits, targets, torch.randn_like(logits))


def test_more_elements_than_32_bits_count() -> None:
    rows, columns = 68000, 32001
    logits = torch.zeros(rows, columns, device="cuda", dtype=BF16)
    targets = torch.full((rows,), columns - 1, device="cuda")
    logits[-1, 5:], targets[-2] = -torch.inf, IGNORED
    targets[-1] = 3
    losses, logsumexp = kernels.cross_entropy_forward(logits, targets, IGNORED)
    plain = torch.full((), columns, device="cuda", dtype=FP32).log()
    assert torch.allclose(losses[:-2], plain) and losses[-2] == 0
    torch.testing.assert_close(losses[-1], torch.tensor(5.0, device="cuda").log())
    one = torch.ones((), device="cuda").expand(rows)
    got = kernels.cross_entropy_backward(logits, targets, logsumexp, one, IGNORED, None)
    last = torch.zeros(columns, device="cuda", dtype=FP32)
    last[:5] = 0.2
    last[3] -= 1
    torch.testing.assert_close(got[-1].float(), last, rtol=2**-8, atol=0)
    assert not got[-2].any()
    torch.testing.assert_close(got[-3, -1], torch.tensor(1 / columns - 1, device="cuda").to(BF16))


def test_rows_apart_in_memory_and_rows_that_begin_anywhere() -> None:
    logits, targets = task(300, 5000)

    def wide(matrix: Tensor, width: int, first: int) -> Tensor:
        apart = torch.full((300, width), torch.nan, device="cuda", dtype=BF16)
        apart[:, first : first + 5000] = matrix
        return apart[:, first : first + 5000]

    addend = torch.randn_like(logits)
    for width, first in ((5008, 0), (5016, 8), (5001, 1), (6000, 3)):
        agrees(wide(logits, width, first), targets, addend)
        agrees(logits, targets, wide(addend, width, first))
    agrees(logits.t().contiguous().t(), targets, addend.t().contiguous().t())
    agrees(logits[1:], targets[1:], addend[:1].expand(299, 5000))


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("vectors", "warps"), [(128, 4), (256, 8), (512, 8), (1024, 8), (1024, 16)])
def test_every_way_to_walk(vectors: int, warps: int, stages: int) -> None:
    walk = Walk(vectors, warps, stages)
    for columns in (30528, 50257):
        logits, targets = task(100, columns)
        addend, given = torch.randn_like(logits), torch.rand(100, device="cuda")
        wanted = forward_kernel(logits, targets, IGNORED)
        for got, want in zip(forward_kernel(logits, targets, IGNORED, walk), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=5e-6, atol=5e-6)
        rest = (logits, targets, wanted[1], given, IGNORED, addend)
        torch.testing.assert_close(backward_kernel(*rest, walk), backward_kernel(*rest), rtol=0, atol=0)


def test_targets_that_are_no_class_give_nan_and_read_nothing() -> None:
    logits, targets = task(64, 32000)
    targets[5], targets[8], targets[17] = 32000, -1, 1 << 50
    losses, logsumexp = kernels.cross_entropy_forward(logits, targets, IGNORED)
    one = torch.ones((), device="cuda").expand(64)
    got = kernels.cross_entropy_backward(logits, targets, logsumexp, one, IGNORED, None)
    torch.cuda.synchronize()
    assert losses.isnan().nonzero().flatten().tolist() == [5, 8, 17]
    assert got.isnan().all(1).nonzero().flatten().tolist() == [5, 8, 17] and int(got.isnan().any(1).sum()) == 3


def test_runs_repeat_bit_by_bit_and_a_cuda_graph_repeats_them() -> None:
    logits, targets = task(2000, 50257)
    addend, given = torch.randn_like(logits), torch.rand(2000, device="cuda")

    def both() -> tuple[Tensor, ...]:
        losses, logsumexp = kernels.cross_entropy_forward(logits, targets, IGNORED)
        rest = (logits, targets, logsumexp, given, IGNORED, addend)
        return losses, logsumexp, kernels.cross_entropy_backward(*rest)

    first = both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(5):
        graph.replay()
        for results in (both(), captured):
            assert all(torch.equal(result, before) for result, before in zip(results, first, strict=True))


# --- with the sums of the gradient ---


def sums_agree(logits: Tensor, targets: Tensor, addend: Tensor | None = None, dtype: torch.dtype = FP32) -> None:
    """Assert the gradient of the kernel without sums, the sums of what was stored, and the same bits in another run."""
    rows, columns = logits.shape
    _, logsumexp = kernels.cross_entropy_forward(logits, targets, IGNORED)
    given = (logits, targets, logsumexp, torch.randn(rows, device="cuda"), IGNORED, addend)
    got, sums = kernels.cross_entropy_backward_with_sums(*given, dtype)
    plain = kernels.cross_entropy_backward(*given)
    # A compiler may fuse multiplications and additions in the one and not in the other.
    eps = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(got, plain, rtol=max(2e-5, eps), atol=1e-6, equal_nan=True)
    assert got.is_contiguous() and (sums.shape, sums.dtype) == ((columns,), dtype)
    exact = torch.cat([part.sum(0, dtype=torch.float64) for part in got.split(4096, dim=1)])  # in pieces: it is large
    scale = got.float().abs().amax() * rows**0.5
    torch.testing.assert_close(
        sums.double(), exact, rtol=torch.finfo(dtype).eps, atol=float(1e-6 * scale), equal_nan=True
    )
    again = kernels.cross_entropy_backward_with_sums(*given, dtype)
    assert torch.equal(again[0], got) and torch.equal(again[1], sums)


@pytest.mark.parametrize("columns", [1024, 4099, 30522, 30528, 32000, 128256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_those_of_what_is_stored(dtype: torch.dtype, columns: int) -> None:
    logits, targets = task(517, columns, dtype)
    sums_agree(logits, targets)
    sums_agree(logits, targets, torch.randn_like(logits), dtype)


@pytest.mark.parametrize("shape", [(1, 2), (3, 6), (70000, 66), (5, 8194)], ids=str)
def test_sums_of_shapes_that_fill_nothing(shape: tuple[int, int]) -> None:
    logits, targets = task(*shape)
    sums_agree(logits, targets, torch.randn_like(logits))


def test_sums_at_the_size_of_bert_large() -> None:
    logits, targets = task(32768, 30528)
    sums_agree(logits, targets, dtype=BF16)


def test_sums_of_more_elements_than_32_bits_count() -> None:
    rows, columns = 68000, 32000
    logits = torch.zeros(rows, columns, device="cuda", dtype=BF16)
    targets = torch.full((rows,), IGNORED, device="cuda")
    targets[-1] = 3
    logits[-1, 5:] = -torch.inf
    _, logsumexp = kernels.cross_entropy_forward(logits, targets, IGNORED)
    one = torch.ones((), device="cuda").expand(rows)
    got, sums = kernels.cross_entropy_backward_with_sums(logits, targets, logsumexp, one, IGNORED, None, FP32)
    assert torch.equal(sums, got[-1].float()) and not got[:-1].any()
    torch.testing.assert_close(sums[:5], torch.tensor([0.2, 0.2, 0.2, -0.8, 0.2], device="cuda"), rtol=2**-8, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("columns", "warps"), [(1024, 4), (2048, 4), (2048, 8), (4096, 8)])
def test_every_way_to_walk_down(rows: int, columns: int, warps: int) -> None:
    for vocabulary in (30522, 32000):
        logits, targets = task(300, vocabulary)
        _, logsumexp = forward_kernel(logits, targets, IGNORED)
        rest = (logits, targets, logsumexp, torch.rand(300, device="cuda"), IGNORED, torch.randn_like(logits), FP32)
        got, wanted = sums_kernel(*rest, Descent(rows, columns, warps, 64)), sums_kernel(*rest)
        torch.testing.assert_close(got[0], wanted[0], rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-3)


# --- models ---


def llama(dtype: torch.dtype = BF16, vocabulary: int = 32000) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=vocabulary, num_hidden_layers=2, **sizes)
    return transformers.LlamaForCausalLM(config).to("cuda", dtype)


def step(model: Any, run: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = run(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize(("vocabulary", "defers"), [(32000, True), (50257, True), (50257, False)])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_llama_trains_as_in_eager_mode_but_for_its_loss(compiler: str, vocabulary: int, defers: bool) -> None:
    know_the_backend()
    torch._dynamo.reset()
    model = llama(vocabulary=vocabulary)
    ids = torch.randint(0, vocabulary, (4, 129), device="cuda")
    labels = torch.where(torch.rand(ids.shape, device="cuda") < 0.2, -100, ids)
    wanted = step(model, model, ids, labels)
    with manager.recording() as records:
        # No FP8, so that the loss is all that differs.
        run = compiled(model, compiler=compiler, exclude=["*"], defer_logits=defers)
        for _ in range(4):  # recorded and then replayed
            got = step(model, run, ids, labels)
    assert {arguments_of(node)["implementation"] for node in te_nodes(records[0], "cross_entropy_forward")} == {
        "triton"
    }
    (backward,) = te_nodes(records[0], "cross_entropy_backward_deferred" if defers else "cross_entropy_backward")
    assert arguments_of(backward)["implementation"] == "triton"
    assert arguments_of(backward)["ticket" if defers else "addend"] is not None
    assert got[0].dtype == FP32
    torch.testing.assert_close(got[0], wanted[0], rtol=2e-3, atol=0)
    assert all(relative_error(got[1][name], gradient) < 5e-2 for name, gradient in wanted[1].items())


@pytest.mark.parametrize("defers", [False, True])
def test_a_head_with_a_bias_gets_its_gradient_from_the_loss(defers: bool) -> None:
    know_the_backend()
    torch._dynamo.reset()
    head = torch.nn.Linear(64, 30522, device="cuda", dtype=BF16)
    x, labels = torch.randn(4, 128, 64, device="cuda", dtype=BF16), torch.randint(0, 30522, (4, 128), device="cuda")
    labels[:, ::2] = -100

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(x)
        return F.cross_entropy(logits.view(-1, 30522), labels.view(-1)), logits

    def trained(run: Any) -> dict[str, Tensor]:
        head.zero_grad(set_to_none=True)
        run(x)[0].backward()
        return gradients(head)

    wanted = trained(function)
    with manager.recording() as records:
        run = compiled(function, compiler="inductor", exclude=["*"], defer_logits=defers)
        for _ in range(4):  # recorded and then replayed
            got = trained(run)
    (backward,) = loss_backwards(records[0], defers)
    assert arguments_of(backward)["implementation"] == "triton" and arguments_of(backward)["sums_dtype"] == BF16
    assert all(relative_error(got[name], gradient) < 5e-2 for name, gradient in wanted.items())


def test_a_llama_in_fp8_learns_with_the_loss_of_its_own() -> None:
    know_the_backend()
    torch._dynamo.reset()
    model = llama()
    run = compiled(model, compiler="inductor", cost_model=False, lm_head=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 32000, (4, 129), device="cuda")
    losses = []
    with manager.recording() as records:
        for _ in range(20):
            losses.append(float(step(model, run, ids, ids)[0]))
            optimizer.step()
    assert te_nodes(records[0], "cross_entropy_backward_deferred") and te_nodes(records[0], "gemm")
    assert losses[-1] < losses[0] / 2, losses


def test_cuda_graphs_train_with_it() -> None:
    know_the_backend()
    torch._dynamo.reset()
    model = llama()
    ids = torch.randint(0, 32000, (2, 128), device="cuda")
    wanted = step(model, model, ids, ids)
    run = compiled(model, compiler="inductor", mode="reduce-overhead", exclude=["*"])
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got = step(model, run, ids, ids)
        torch.testing.assert_close(got[0].clone(), wanted[0], rtol=2e-3, atol=0)
        assert all(relative_error(got[1][name], gradient) < 5e-2 for name, gradient in wanted[1].items())


def test_logits_that_only_the_loss_reads_share_their_memory_with_their_gradient() -> None:
    know_the_backend()
    torch._dynamo.reset()
    rows, columns = 2048, 32000
    hidden = torch.randn(rows, 64, device="cuda", dtype=BF16, requires_grad=True)
    head = torch.nn.Linear(64, columns, bias=False, device="cuda", dtype=BF16)
    targets = torch.randint(0, columns, (rows,), device="cuda")

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), targets)

    run = compiled(loss, compiler="inductor", exclude=["*"])
    for _ in range(3):
        run(hidden).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(hidden).backward()
    logits = 2 * rows * columns
    assert torch.cuda.max_memory_allocated() - before < 1.5 * logits, "the logits, in 16 bits, and little beside them"
