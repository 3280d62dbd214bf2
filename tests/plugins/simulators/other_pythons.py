"""Makes Pythons that have the packages of this one, and a package of their own."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def other_python(folder: Path, version: int | None) -> Path:
    """An interpreter whose `pinned_sim` has this version, if it has one at all."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if version is not None:
        (packages / "pinned_sim.py").write_text(f"VERSION = {version}\n")
    return folder / "bin" / "python"
