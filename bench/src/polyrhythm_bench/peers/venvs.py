"""Creates a virtual environment for each peer from its pinned requirements, and again when these change."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import venv
from pathlib import Path

from polyrhythm.errors import StartError

log = logging.getLogger(__name__)

PEERS = ("sample_factory", "torchrl", "sb3")
_HERE = Path(__file__).parent
_STAMP = "requirements.txt"
#: Most seconds that one call of pip may take.
_PIP_S = 1800.0


def default_folder() -> Path:
    """The default folder of the virtual environments, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyrhythm" / "peers"


def requirements(peer: str) -> str:
    """The text of a peer's requirements; all are pinned, so pip resolves nothing."""
    return (_HERE / f"requirements_{peer}.txt").read_text(encoding="utf-8")


def torch_of(text: str) -> str:
    """The line that pins torch."""
    return next(line for line in text.splitlines() if line.startswith("torch=="))


def python_of(peer: str, folder: Path) -> Path:
    """The peer's Python; create its environment if needed. StartError: that failed."""
    place, text = folder / peer, requirements(peer)
    python, stamp = place / "bin" / "python", place / _STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == text:
        return python
    log.info("making the environment of %s in %s", peer, place)
    if place.exists() and not (place / "pyvenv.cfg").is_file():
        raise StartError(f"{place} is not a Python virtual environment; move it away or name another folder")
    shutil.rmtree(place, ignore_errors=True)
    try:
        venv.create(place, with_pip=True)
        written = place / "wanted.txt"
        written.write_text(text, encoding="utf-8")
        # Torch is installed first and alone, because a machine may provide its own build.
        _pip(python, [torch_of(text)])
        _pip(python, ["-r", str(written)])
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(f"the environment of {peer} cannot be made in {place}: {_words(error)}") from error
    written.rename(stamp)
    return python


def _pip(python: Path, words: list[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=_PIP_S)  # noqa: S603


def _words(error: BaseException) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.decode(errors="replace").splitlines() if "ERROR" in line]
        return lines[0] if lines else str(error)
    return str(error)
