"""What was decided about each linear and attention of a captured graph, and why: what reports and strict mode read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakValueDictionary

from torch.fx import Node
from torch.nn import Parameter

from te_compile.ops.quantize import padded
from te_compile.passes.cached_weights import WeightGroup
from te_compile.passes.regions import Region
from te_compile.passes.weight_expressions import Matrix, NotAWeightError, Weight, Weights


class Cause(Enum):
    """Why a linear stays in high precision."""

    USER = "asked for by an option"
    RULE = "left alone by rule"
    UNSUPPORTED = "not supported"


Verdict = tuple[Cause, str] | None
"""Why a linear must stay in high precision; None where nothing speaks against FP8."""


class StrictError(RuntimeError):
    """``strict=True`` and something would run in high precision because te_fp8 does not support it."""


_NOTHING_TO_DO = "; nothing to do: "  # how reasons begin what is no advice


@dataclass
class Site:
    """One linear of the graph: where it is, what it multiplies and what becomes of it.

    ``tokens`` is M, the rows of x (a hint where the size is symbolic); ``features`` is (in, out). ``matrix`` is what is
    quantised and ``root_weight`` the root placeholder of the parameter behind it, for sites that can be lowered.
    ``linears`` is how many equal ones the node computes. ``ends`` is given where they share the rows of x, each taking
    those up to its own end. ``local_name`` is what Dynamo calls it where that is another name. ``spell`` writes them
    out as plain products, for a node that is none, and returns the node of the result and their sites. ``reason`` is
    empty for ``status`` "fp8".
    """

    name: str
    form: str
    region: Region
    node: Node
    tokens: int
    features: tuple[int, int]
    x: Node | None = None
    weight: Node | None = None
    bias: Node | None = None
    transposed: bool = False
    root_weight: Node | None = None
    matrix: Matrix | None = None
    linears: int = 1
    local_name: str = ""
    ends: Node | None = None
    spell: Callable[[Site], tuple[Node, list[Site]]] | None = None
    reason: str = ""
    cause: Cause | None = None

    @property
    def status(self) -> str:
        """ "fp8" or "kept"."""
        return "kept" if self.cause else "fp8"

    @property
    def rows(self) -> int:
        """The rows of x of all its linears."""
        return self.tokens if self.ends is not None else self.tokens * self.linears

    @property
    def flops(self) -> int:
        """Forward floating-point operations: two per multiply-add."""
        return 2 * self.rows * self.features[0] * self.features[1]

    @property
    def padding(self) -> tuple[int, int]:
        """The (in, out) features that FP8 adds, all zero, to reach multiples of 16."""
        in_features, out_features = self.features
        return padded(in_features) - in_features, padded(out_features) - out_features

    def multiplies_by(self, weight: Weight) -> None:
        """Take ``weight`` as this linear's own."""
        self.weight, self.transposed = weight.operand, weight.transposed
        self.matrix, self.root_weight = weight.matrix, weight.matrix.owner

    def has_a_parameter(self, weights: Weights) -> bool:
        """Is ``weight``, of a node that is to be written out, made from a parameter? Then that is ``root_weight``, and
        the site is kept if the weight cannot be quantised."""
        assert self.weight is not None
        try:
            self.root_weight = weights.parameter(self.weight, self.region)
        except NotAWeightError as reason:
            self.root_weight = weights.owner(self.weight, self.region)
            self.keep(Cause.UNSUPPORTED, str(reason))
        return self.root_weight is not None

    def keep(self, cause: Cause, reason: str) -> None:
        """Leave this linear in high precision; the first reason given stands."""
        if self.cause is None:
            self.cause, self.reason = cause, reason


@dataclass(frozen=True)
class AttentionRecord:
    """What became of one attention.

    name: the module that it runs in.
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
    kernel: "cudnn", "flash", "efficient", "short", "exact", "finite", "window", "tiles", "biased", "sinks", "core" or
        "te" where that was chosen instead of what PyTorch would run; empty where it chooses.
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


@dataclass(frozen=True)
class Attention(AttentionRecord):
    """One attention of the graph after the passes that rewrite it. ``node`` tells the module that it ran in."""

    node: Node = field(kw_only=True)


@dataclass
class Plan:
    """What one captured graph consists of. ``parameters``: what the user's model holds at root placeholders, for as
    long as it does: compiled code has the plan, and may outlive the model; ``groups``: the weights that are quantised
    outside of the graph, known once it is lowered."""

    sites: list[Site] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    parameters: WeakValueDictionary[Node, Parameter] = field(default_factory=WeakValueDictionary)
    groups: list[WeightGroup] = field(default_factory=list)

    @property
    def selected(self) -> list[Site]:
        """The sites that run in FP8."""
        return [site for site in self.sites if site.status == "fp8"]

    @property
    def eligible(self) -> list[Site]:
        """The sites that FP8 is meant for: all but those kept by rule or by the user."""
        return [site for site in self.sites if site.cause in (None, Cause.UNSUPPORTED)]

    @property
    def fp8_flops_fraction(self) -> float:
        """Share of the eligible linear FLOPs that run in FP8; 1 where there are none."""
        eligible = sum(site.flops for site in self.eligible)
        return sum(site.flops for site in self.selected) / eligible if eligible else 1.0

    def why_nothing_runs(self) -> str:
        """The reasons for which none of the linears runs in FP8, in one line; "" where one does, where most stay by a
        rule or because the user said so, and where nobody can do anything about it."""
        lacking = [site for site in self.eligible if _NOTHING_TO_DO not in site.reason]
        most = 2 * sum(site.flops for site in lacking) > sum(site.flops for site in self.sites)
        return "" if self.selected or not most else "; or ".join(dict.fromkeys(site.reason for site in lacking))

    def require_all_supported(self) -> None:
        """Raise StrictError if anything stays in high precision for want of support."""
        lacking = [site for site in self.sites if site.cause is Cause.UNSUPPORTED]
        if lacking:
            raise StrictError(
                f"strict=True: {len(lacking)} linear(s) cannot run in FP8:\n{describe(lacking)}\n"
                "Exclude them by name with exclude=[...], or drop strict to leave them in high precision."
            )


def describe(sites: Sequence[Site]) -> str:
    """One line per site: name, shape and reason."""
    lines = (f"  {s.name} {s.form} {s.features[0]}→{s.features[1]}: {s.reason}" for s in sites)
    return "\n".join(lines)
