"""The functions that Dynamo gave up on as a whole.

Where tracing fails with no way to break the graph, Dynamo runs the function as it is and begins anew with each that it
calls. It counts no graph break for that; what it keeps is a record for each function that it tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo import utils
from torch._dynamo.utils import CompilationMetrics

_ENOUGH = 1 << 20  # records; Dynamo keeps fewer than a large model has functions


@contextmanager
def failed_frames(failed: list[CompilationMetrics]) -> Iterator[None]:
    """At the end ``failed`` gets the records of what was tried inside and given up; Dynamo's list is as it was."""
    kept = utils.get_compilation_metrics()
    limit = utils._compilation_metrics.maxlen
    utils.set_compilation_metrics_limit(_ENOUGH)
    utils.clear_compilation_metrics()
    try:
        yield
    finally:
        failed += [each for each in utils.get_compilation_metrics() if each.fail_type == "Unsupported"]
        utils.clear_compilation_metrics()
        utils._compilation_metrics.extend(kept)
        utils.set_compilation_metrics_limit(_ENOUGH if limit is None else limit)
