"""Makes a Python of its own for a simulator: `polyrhythm envs setup NAME`.

It gets this package without what only training needs (torch, tensorboard), and the extra of that name with the versions
that the extra asks for, so that its pins conflict with no others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from polyrhythm.errors import ConfigError, MissingError, StartError, nearest

_PACKAGE = "polyrhythm"
#: Requirements of the package that a simulator's process does not import.
_NOT_NEEDED = ("torch", "tensorboard")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: Characters of a step's output that an error quotes.
_LAST_CHARS = 400


def envs_folder() -> Path:
    """Folder of the environments that `polyrhythm envs setup` creates: $POLYRHYTHM_ENVS, else
    ~/.cache/polyrhythm/envs."""
    own = os.environ.get("POLYRHYTHM_ENVS")
    return Path(own) if own else Path.home() / ".cache" / "polyrhythm" / "envs"


def find_python(python: str, setting: str) -> Path:
    """The interpreter that a setting names: of `polyrhythm envs setup`, or by its path or its environment's folder.
    MissingError: it does not exist."""
    named = os.sep not in python
    path = envs_folder() / python / "bin" / "python" if named else Path(python).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    if os.access(path, os.X_OK) and path.is_file():
        return path
    remedy = "name an interpreter, or the folder of an environment"
    extras = metadata.metadata("polyrhythm").get_all("Provides-Extra") or []
    if python in extras:
        remedy = f"run: polyrhythm envs setup {python}"
    elif named:
        made = [path.name for path in envs_folder().glob("*")]
        near = nearest(python, sorted({*made, *extras}))
        remedy = f"make it: polyrhythm envs setup {python} --with REQUIREMENT"
        if near:
            remedy = f"{near}or {remedy}"
    raise MissingError(f"{setting} = {python}: {path} is not a Python interpreter; {remedy}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="with setup: the extra, which names the Python too")
    parser.add_argument("--interpreter", metavar="PATH", help="with setup: the Python to make it from (default: this)")
    parser.add_argument(
        "--with", dest="more", action="append", default=[], metavar="REQUIREMENT", help="with setup: install this too"
    )


def refuse_without(arguments: argparse.Namespace) -> None:
    """ConfigError: arguments of `envs setup` are passed to another command."""
    if arguments.name or arguments.interpreter or arguments.more:
        raise ConfigError("NAME, --interpreter and --with belong to polyrhythm envs setup NAME")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.name:
        raise ConfigError("envs setup: for which environment? polyrhythm envs setup NAME")
    default = getattr(sys, "_base_executable", "") or sys.executable  # from which this one's environment was made
    made = set_up(arguments.name, envs_folder(), arguments.interpreter or default, arguments.more)
    print(f"ready: {made}\nuse it by env.python={arguments.name}")
    return 0


def set_up(name: str, folder: Path, python: str, more: Sequence[str]) -> Path:
    """Create the environment `folder`/`name` and return its interpreter. more: further requirements.

    ConfigError: the name is invalid or exists already, or there is neither an extra of that name nor a requirement.
    StartError: a step failed; the folder is removed.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"envs setup {name}: a name has letters, digits and _.- alone")
    wanted = requirements(name, more)
    place = folder / name
    if place.exists():
        raise ConfigError(f"envs setup {name}: {place} is there already; use it, or remove that folder first")
    interpreter = place / "bin" / "python"
    print(f"{place}: Python of {python}, with {', '.join(wanted)}", flush=True)
    pip = [str(interpreter), "-m", "pip", "install", "--no-input", "--quiet"]
    try:
        _run([python, "-m", "venv", str(place)], "a virtual environment cannot be made")
        _run([*pip, *wanted], "pip cannot install these")
        origin = metadata.distribution(_PACKAGE).read_text("direct_url.json")
        direct = json.loads(origin) if origin else {}  # a development checkout, or where this version came from
        itself = [direct.get("url", f"{_PACKAGE}=={metadata.version(_PACKAGE)}")]
        if direct.get("dir_info", {}).get("editable"):
            itself = ["-e", direct["url"].removeprefix("file://")]
        _run([*pip, "--no-deps", *itself], "polyrhythm cannot be installed")
        _run([str(interpreter), "-c", "import polyrhythm.plugins.simulators.separate.server"], "it does not start")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return interpreter


def requirements(name: str, more: Sequence[str] = ()) -> list[str]:
    """Requirements of the extra `name`, besides this package. ConfigError: there is no such extra, and `more` is
    empty."""
    declared = metadata.metadata(_PACKAGE)
    extras = sorted(set(declared.get_all("Provides-Extra") or ()))
    if name not in extras and not more:
        raise ConfigError(
            f"envs setup {name}: no extra of polyrhythm has this name ({', '.join(extras)}); name one, or what to "
            "install by --with"
        )
    found = []
    for requirement in metadata.requires(_PACKAGE) or ():
        text, _, condition = (part.strip() for part in requirement.partition(";"))
        own = not condition or condition.replace("'", '"') == f'extra == "{name}"'
        if own and not text.startswith(_NOT_NEEDED):
            found.append(text)
    return [*found, *more]


def _run(command: Sequence[str], problem: str) -> None:
    """Run a step without stdin. StartError: it failed; the message quotes the end of its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"PIP_NO_INPUT": "1"},
            check=False,
        )
    except OSError as error:
        raise StartError(f"{problem}: {command[0]} cannot be started ({error.strerror})") from error
    if done.returncode:
        last = " | ".join(line for line in done.stdout.strip().splitlines() if line.startswith("ERROR")) or done.stdout
        raise StartError(f"{problem}: {' '.join(command)}: {last[-_LAST_CHARS:]}")
