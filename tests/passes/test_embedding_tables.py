"""A table stays one behind a graph break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from te_compile.passes import manager
from te_compile.passes.plan import Cause
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_head_whose_embedding_is_behind_a_graph_break() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc, self.out = nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48)
            self.out.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            torch._dynamo.graph_break()
            return self.out(self.fc(x))

    with manager.recording() as records, torch.no_grad():
        compiled(Tied())(torch.randint(0, 48, (2, 5)))
    sites = {site.name: site for record in records for site in record.plan.sites}
    assert sites["fc"].status == "fp8"
    assert sites["out"].cause is Cause.RULE and "tied" in sites["out"].reason
