"""Loading modules of kernels that this package wrote itself, and that lie on nobody's path."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def load_from(name: str, file: str) -> ModuleType:
    """The module in ``file``, from now on known as ``name``."""
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None and found.loader is not None, f"{file} is no module"
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
