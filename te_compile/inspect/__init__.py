"""What te_fp8 did to a model, or would do: ``explain`` and its report, two reports compared, and ``stats``."""

from te_compile.inspect.attentions import AttentionRow
from te_compile.inspect.difference import Difference, RowChange, diff
from te_compile.inspect.explanation import explain
from te_compile.inspect.health import stats
from te_compile.inspect.report import GraphPass, Report, Row
from te_compile.inspect.statistics import Statistics, TensorStatistics

__all__ = [
    "AttentionRow",
    "Difference",
    "GraphPass",
    "Report",
    "Row",
    "RowChange",
    "Statistics",
    "TensorStatistics",
    "diff",
    "explain",
    "stats",
]
