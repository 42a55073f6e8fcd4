"""One attention of a report, and the words in which every form of the report tells about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    "window": "on kernels that skip what is outside of the window",
    "tiles": "on te_compile's kernels, which skip the tiles that it hides",
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
class AttentionRow:
    """One attention.

    name: the module that it runs in, in the user's model.
    status: "recognised" (the model spells it out; it became ``F.scaled_dot_product_attention``), "sinks" (it does, and
        has sinks; it became ``te::sink_attention``), "sdpa" (it is SDPA already) or "stays" (it runs as the model
        wrote it).
    reason: why it stays.
    mask: "none"; "is_causal", the call's own flag; "folded_causal" or "folded_all", by what it was proved to mean;
        "folded_window", keys around each query's own place; "folded_rows", one that hides whole rows, of the result
        now; "kept". Empty for what stays.
    mask_reason: why the mask is kept.
    heads: what became of keys and values that the model copies for several heads of queries, "undone" or "copied", or
        of a single head of them that it broadcasts, "shared" or "broadcast"; empty where it does neither.
    heads_reason: why they stay copied or broadcast.
    precision: "fp8", or "kept" in high precision; empty where the recipe does not ask for FP8 attention.
    precision_reason: why it is kept.
    kernel: "cudnn", "flash", "efficient", "window", "tiles", "sinks", "core" or "te" where that was chosen instead of
        what PyTorch would run; empty where it chooses.
    """

    name: str
    status: str
    reason: str = ""
    mask: str = ""
    mask_reason: str = ""
    heads: str = ""
    heads_reason: str = ""
    precision: str = ""
    precision_reason: str = ""
    kernel: str = ""

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
