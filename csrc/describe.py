"""Write the package's metadata into a folder, so that a checkout on PYTHONPATH is found like an installed package.

    python csrc/describe.py [FOLDER]        FOLDER/te_compile.egg-info; by default in the checkout

torch.compile finds backends by entry points, which are metadata and not code: without them ``backend="te_fp8"`` would
be unknown until somebody imports te_compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit("no te_compile.egg-info: reading pyproject.toml needs Python 3.11; import te_compile, then its backend")
import tomllib

ROOT = Path(__file__).resolve().parent.parent


def describe(target: Path) -> None:
    """Name, version and entry points as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = target / f"{project['name'].replace('-', '_')}.egg-info"
    folder.mkdir(exist_ok=True)
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "PKG-INFO").write_text(header)
    groups = (
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""])
        for group, entries in project.get("entry-points", {}).items()
    )
    (folder / "entry_points.txt").write_text("\n".join(groups))


if __name__ == "__main__":
    describe(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
