"""One attention of a report, and the words in which every form of the report tells about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from te_compile.passes.plan import Attention, AttentionRecord

HEADINGS = ("attention", "", "runs as", "its mask and key heads, or why it stays")

_RUNS_AS = {
    "recognised": "sdpa, recognised",
    "sinks": "attention with sinks, recognised",
    "sdpa": "sdpa",
    "stays": "as written",
}
_MASKS = {
    "none": "no mask",
    "is_causal": "causal by its own flag",
    "folded_causal": "mask folded away: causal",
    "folded_all": "mask folded away: all true",
    "folded_window": "mask folded away: a window",
    "folded_rows": "mask moved behind attention: it hides whole rows",
    "kept": "mask kept",
}
_PRECISIONS = {"kept": "kept in high precision"}
_KERNELS = {
    "cudnn": "on cuDNN, ahead of PyTorch's order",
    "flash": "on flash, for cuDNN would round its dropout to sixteenths",
    "efficient": "on the memory-efficient kernel, which alone has a gradient for its bias",
    "short": "on the memory-efficient kernel, the fastest for few positions",
    "exact": "off cuDNN, which would round its dropout to sixteenths",
    "finite": "past a fault of cuDNN, whose gradients would be no numbers where all scores of a query are low",
    "window": "on kernels that skip what is outside of the window",
    "tiles": "on te_compile's kernels, which skip the tiles that it hides",
    "biased": "on te_compile's kernels, to which its bias is added",
    "core": "on te_compile's kernels, which need no plan for each size",
    "sinks": "on kernels to whose sums the sinks are added",
    "te": "on te_compile's kernels, which draw its dropout once, as bits",
}
_HEADS = {
    "undone": "copies of key heads undone",
    "copied": "key heads stay copied",
    "shared": "one key head shared by all queries",
    "broadcast": "one key head stays broadcast",
}


@dataclass(frozen=True)
class AttentionRow(AttentionRecord):
    """One attention of a report, by its name in the user's model; the fields are those of ``AttentionRecord``."""

    @staticmethod
    def of(attention: Attention, name: str) -> AttentionRow:
        """The row of ``attention``, which is called ``name`` in the model at hand."""
        said = {each.name: getattr(attention, each.name) for each in fields(AttentionRow)}
        return AttentionRow(**{**said, "name": name})

    @property
    def runs_as(self) -> str:
        """The status in words."""
        words = _RUNS_AS[self.status]
        return words.replace("sdpa", "fp8") if self.precision == "fp8" else words

    @property
    def detail(self) -> str:
        """Everything else in one line."""
        return self.reason or "; ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        told = (
            (_PRECISIONS.get(self.precision), self.precision_reason),
            (_MASKS.get(self.mask), self.mask_reason),
            (_HEADS.get(self.heads), self.heads_reason),
            (_KERNELS.get(self.kernel), ""),
        )
        yield from (f"{what}: {why}" if why else what for what, why in told if what)
