"""The demo and the measurements: ``python -m benchmarks.<name>``. README.md beside this file says how to run each.

torch.compile finds te_fp8 by the entry point of the installed package. A checkout that is only on the path has none, so
the backend is registered here for it.
"""

from torch._dynamo.backends.registry import list_backends, register_backend

from te_compile import te_fp8

if "te_fp8" not in list_backends(exclude_tags=()):
    register_backend(te_fp8, name="te_fp8")
