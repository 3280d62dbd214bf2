"""Measures what a newcomer waits for: from nothing installed to a trained policy, step by step, on this machine.

    python bench/scripts/onboarding.py wheel [--extra metaworld] [--pip-cache]
    python bench/scripts/onboarding.py clone [--recipe quickstart] [--pip-cache]

wheel: build the wheel, install it into a new virtual environment, then check and train the environment of
docs/first-environment.md with it, in an empty folder. clone: clone this checkout, `make setup`, train the recipe.
Prints JSON: seconds of each step by the clock. Without --pip-cache pip keeps and uses no cache. Everything lies in a
temporary folder that is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What the caller's own Python would add to that of the new environment.
_OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Steps:
    """Runs commands one after another and keeps the seconds of each."""

    def __init__(self, pip_cache: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._environ = {key: value for key, value in os.environ.items() if key not in _OWN}
        if not pip_cache:
            self._environ["PIP_NO_CACHE_DIR"] = "1"

    def run(self, name: str, command: list[str], folder: Path) -> None:
        began = time.monotonic()
        done = subprocess.run(  # noqa: S603
            command, cwd=folder, env=self._environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        self.seconds[name] = round(time.monotonic() - began, 1)
        print(f"{name}: {self.seconds[name]} s", file=sys.stderr)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout.decode(errors='replace')[-4000:]}")

    def train(self, name: str, command: list[str], folder: Path) -> None:
        """Run a training command; also the seconds until its first update, from the file of its metrics."""
        began = time.time()
        self.run(name, command, folder)
        (metrics,) = folder.glob("runs/*/*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        # Imitation and evaluations have lines of their own before that of the first update.
        first = next(line["time_s"] for line in lines if "throughput/transitions" in line)
        ago = metrics.stat().st_mtime - began - lines[-1]["time_s"]
        self.seconds[f"{name}: to the first update"] = round(ago + first, 1)


def example() -> dict[str, str]:
    """Name → text of the two files of docs/first-environment.md."""
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", (ROOT / "docs/first-environment.md").read_text(), re.DOTALL)
    files: dict[str, str] = {}
    for language, text in blocks:
        files.setdefault({"python": "line.py", "yaml": "line.yaml"}[language], text)
    return files


def wheel(folder: Path, steps: Steps, extra: str) -> None:
    python, mine = str(folder / "env/bin/python"), folder / "mine"
    mine.mkdir()
    steps.run(
        "build the wheel", [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", ".", str(ROOT)], folder
    )
    (built,) = folder.glob("*.whl")
    steps.run("virtual environment", [sys.executable, "-m", "venv", "env"], folder)
    named = f"polyrhythm[{extra}] @ file://{built}" if extra else str(built)
    steps.run("pip install", [python, "-m", "pip", "install", "-q", named], folder)
    for name, text in example().items():
        (mine / name).write_text(text, encoding="utf-8")
    command = str(folder / "env/bin/polyrhythm")
    steps.run("polyrhythm check line.yaml", [command, "check", "line.yaml"], mine)
    steps.train("polyrhythm train line.yaml", [command, "train", "line.yaml"], mine)


def clone(folder: Path, steps: Steps, recipe: str) -> None:
    steps.run("git clone", ["git", "clone", "-q", "--no-hardlinks", str(ROOT), "checkout"], folder)
    checkout = folder / "checkout"
    steps.run("make setup", ["make", "setup"], checkout)
    steps.train(f"polyrhythm train {recipe}", [".venv/bin/polyrhythm", "train", recipe], checkout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", choices=("wheel", "clone"))
    parser.add_argument("--extra", default="", help="of the wheel, such as metaworld")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--pip-cache", action="store_true")
    given = parser.parse_args()
    steps = Steps(given.pip_cache)
    with tempfile.TemporaryDirectory(prefix="onboarding-") as name:
        folder = Path(name)
        if given.path == "wheel":
            wheel(folder, steps, given.extra)
        else:
            clone(folder, steps, given.recipe)
        steps.seconds["all"] = round(sum(value for key, value in steps.seconds.items() if ": to" not in key), 1)
    print(json.dumps(steps.seconds, indent=2))


if __name__ == "__main__":
    main()
