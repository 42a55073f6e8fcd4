"""Passes that may be left out: they are those of the pipeline, and nothing comes out wrong without one."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import te_compile
from te_compile import backend
from te_compile.optional_passes import OPTIONAL_PASSES
from te_compile.options import Options
from te_compile.passes import DIRECTION_PASSES, JOINT_PASSES, manager, normalize_passes
from tests.compiling import compiled, cosine
from tests.conftest import ORDER_VARIABLE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DOCS = Path(__file__).parents[1] / "docs" / "passes.md"
REQUIRED = {
    "follow_writes", "make_apart", "find_attentions", "narrow_masks", "exact_dropouts", "finite_gradients",
    "find_linears", "select_linears", "spell_out_linears", "lower_linears", "note_constant_inputs", "open_norms",
    "lay_out_attention_gradients", "choose_implementations", "set_names_aside", "keep_read_logits", "tag_memory",
    "recomputed_attentions", "share_across_regions", "choose_attention_kernels", "lay_out_biases",
    "settle_sums",
}  # fmt: skip
SAMPLE = 8


def test_the_docs_say_what_each_does() -> None:
    text = DOCS.read_text(encoding="utf-8")
    missing = [name for name in OPTIONAL_PASSES if f"\n  {name} " not in text]
    assert not missing


class Block(nn.Module):
    """A norm, attention that is spelled out, and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate, self.down = (nn.Linear(*sizes) for sizes in ((width, 64), (width, 64), (64, width)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (part(h).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * k.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
        x = x + self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Patches, a layer of torch.nn's, two blocks that are recomputed, and a loss; the logits are returned beside it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv1d(8, width, 4, stride=4)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 48)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(self.patches(x).transpose(1, 2))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        logits = self.lm_head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def pipeline() -> set[str]:
    """The names of all passes: of those that are listed, of those that the backend imports, and of all that run."""
    listed = {each.func if isinstance(each, partial) else each for each in normalize_passes(Options())}
    listed |= {*JOINT_PASSES, *DIRECTION_PASSES}
    imported = {
        name for name, each in vars(backend).items()
        if callable(each) and getattr(each, "__module__", "") == f"te_compile.passes.{name}"
    }  # fmt: skip
    with manager.recording() as records:
        compiled(Model())(torch.randn(4, 8, 64), torch.randint(48, (4, 16)))
    ran = {each.name for record in records for each in record.passes}
    return {each.__name__ for each in listed} | imported | ran | {"time_tiles"}  # which runs on a GPU alone


def test_every_pass_is_optional_or_required() -> None:
    known = REQUIRED | set(OPTIONAL_PASSES)
    assert len(known) == len(REQUIRED) + len(OPTIONAL_PASSES)  # none twice
    assert pipeline() == known


def todays_sample() -> list[str]:
    return random.Random(os.environ.get(ORDER_VARIABLE)).sample(OPTIONAL_PASSES, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", todays_sample())
def test_nothing_is_wrong_without_a_pass(name: str) -> None:
    model = Model()
    x, labels = torch.randn(4, 8, 64), torch.randint(48, (4, 16))
    wanted = [y.detach() for y in model(x, labels)]
    model(x, labels)[0].backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with manager.recording() as records:
        loss, logits = compiled(model, skip_passes=name, save_memory=name in ("remake_transposed", "transpose_late"))(
            x, labels
        )
        loss.backward()
    assert name not in {each.name for record in records for each in record.passes}
    assert abs(float(loss - wanted[0])) < 0.05 * float(wanted[0]) and cosine(logits, wanted[1]) > 0.98
    for got, want in zip(model.parameters(), expected, strict=True):
        assert got.grad is not None and want is not None
        if want.dim() > 1 and float(want.norm()) > 1e-3:
            assert cosine(got.grad, want) > 0.9


def test_a_report_says_what_was_left_out() -> None:
    report = te_compile.explain(Block(32), torch.randn(2, 16, 32), options={"skip_passes": "recognise_norms"})
    assert "passes left out, as asked: recognise_norms" in report.notes
