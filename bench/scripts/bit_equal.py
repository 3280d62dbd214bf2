"""Trains small lock-step runs in two checkouts and compares every version's weights and every metric, bit for bit.

    python bench/scripts/bit_equal.py --against ../before [--only cartpole chains] [--keep FOLDER]

This checkout is the other one. Each run is a process of its own with the checkout's sources, by this Python: the same
machine, torch and packages for both. `resumed` is a run of the old one that both go on with. Compared are the trainer's
state at every version (weights, optimizer, moments), the policy at the end, the metrics except those of time, and the
counts in the summary. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parents[2]
#: Recipe and settings of each run.
RUNS: dict[str, tuple[str, ...]] = {
    "cartpole": ("cartpole", "seed=1", "training.versions=12"),
    "quickstart": (  # as the recipe was at `before-38`
        *("quickstart", "training.versions=3", "training.critic_warmup_updates=1", "evaluation.episodes=8"),
        *("rollout.simulators=1", "rollout.rows=32", "rollout.sharding=even:4", "supervised.steps=45"),
        *("training.optimizer.lr_final_fraction=0.4", "demonstrations.episodes_per_task=8"),
    ),
    "pi0": ("quickstart_pi0", "training.versions=2", "training.critic_warmup_updates=0", "evaluation.episodes=4"),
    "chains": (
        *("quickstart_lm", "env.terms=[2,3]", "training.versions=2", "evaluation.episodes=16", "rollout.rows=64"),
        *("training.mini_batch_samples=64", "demonstrations.episodes_per_task=1000", "supervised.steps=120"),
    ),
    "leased": (
        *("cartpole", "seed=1", "training.versions=3"),
        *("placement.sharing=lease", "placement.lease.min_hold_s=0.05"),
    ),
    "ranks": (  # with second_copy it depends on time which versions are evaluated
        *("cartpole", "seed=1", "training.versions=3", "placement.trainer.ranks=2", "evaluation.every=1"),
        *("evaluation.weights=pause", "rollout.segment_steps=0"),
    ),
    "resumed": ("cartpole", "seed=1", "training.versions=2"),
}
LOCKSTEP = ("preset=lockstep", "checkpoint.keep_every=1")
#: Metrics that depend on when something happened.
OF_TIME = re.compile(r"time_s|time/.*|.*_per_s|.*/idle_ratio|.*/batch_wait_ratio|(stations|hosts)/utilisation/.*")
#: What must agree in the summaries.
COUNTED = ("before", "after", "lag", "ledger", "groups", "set_aside", "failed_samples")


def run(checkout: Path, words: Sequence[str], out: Path) -> None:
    """Train or resume in a checkout. Raises CalledProcessError if that fails."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(checkout / "src")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-m", "polyrhythm", *words]
    with (out.parent / f"{out.name}.log").open("w+") as log:
        ended = subprocess.run(command, env=environment, cwd=out.parent, stdout=log, stderr=log, check=False)  # noqa: S603
        log.seek(0)
        if ended.returncode:
            print(f"{' '.join(command)}, in {checkout}:", log.read()[-4000:], sep="\n")
    ended.check_returncode()


def run_both(name: str, settings: Sequence[str], checkouts: Sequence[Path], outs: Sequence[Path]) -> None:
    """The run in the old checkout and in the new one. `resumed`: one of the old, which both go on with."""
    words = ("train", *RUNS[name], *LOCKSTEP, *settings, "--out")
    if name == "resumed":
        run(checkouts[0], (*words, str(outs[0])), outs[0])
        shutil.copytree(outs[0], outs[1])
    for checkout, out in zip(checkouts, outs, strict=True):
        run(checkout, ("resume", str(out), "training.versions=4") if name == "resumed" else (*words, str(out)), out)


def differences(old: Any, new: Any, where: str) -> Iterator[str]:
    """The places at which two states differ; a tensor in any bit."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if old.dtype != new.dtype or old.shape != new.shape:
            yield f"{where}: {old.dtype} {tuple(old.shape)} was, {new.dtype} {tuple(new.shape)} is"
        elif _bits(old) != _bits(new):
            far = (old.double() - new.double()).abs().max().item()
            yield f"{where}: differs by up to {far:g}"
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}, key=str):
            if name not in old or name not in new:
                yield f"{where}.{name}: only in the {'old' if name in old else 'new'} one"
            else:
                yield from differences(old[name], new[name], f"{where}.{name}")
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif type(old) is not type(new) or (old != new and repr(old) != repr(new)):  # nan is itself
        yield f"{where}: {old!r} was, {new!r} is"


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def digest(state: Mapping[str, Any]) -> str:
    """SHA-256 of a policy's weights, by name."""
    found = hashlib.sha256()
    for name in sorted(state):
        if isinstance(tensor := state[name], Tensor):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + _bits(tensor))
    return found.hexdigest()[:16]


def states(run: Path) -> dict[str, Any]:
    """The trainer's state at every version, and the policy at the end."""
    files = [*sorted((run / "checkpoints").glob("trainer-*.pt")), run / "policy.pt"]
    return {file.stem: torch.load(file, map_location="cpu", weights_only=True) for file in files}


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics without those of time."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = [{name: value for name, value in row.items() if not OF_TIME.fullmatch(name)} for row in lines]
    return [row for row in kept if len(row) > 1]


def counts(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    return {name: summary.get(name) for name in COUNTED}


def compare(old: Path, new: Path) -> list[str]:
    """What differs between two run folders, in words."""
    before, after = states(old), states(new)
    found = []
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            found.append(f"{name}: only in the {'old' if name in before else 'new'} run")
            continue
        print(f"    {name}  weights {digest(before[name]['policy'])} {digest(after[name]['policy'])}")
        ignored = {"config", "settings"}  # of `policy.pt`: names in it may change, weights may not
        one, other = ({key: x for key, x in state[name].items() if key not in ignored} for state in (before, after))
        found += differences(one, other, name)
    found += differences(rows(old), rows(new), "metrics")
    if len(rows(old)) != len(rows(new)):
        found.append(f"metrics: {len(rows(old))} rows were, {len(rows(new))} are")
    return found + list(differences(counts(old), counts(new), "summary"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="the checkout of before")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="RUN", help=" ".join(RUNS))
    parser.add_argument("--keep", type=Path, help="folder for the run folders, which are removed otherwise")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="further settings of all runs")
    arguments = parser.parse_args()
    differs = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        for name in arguments.only:
            (folder / name).mkdir(parents=True, exist_ok=True)
            outs, began = (folder / name / "old", folder / name / "new"), time.monotonic()
            try:
                run_both(name, arguments.settings, (arguments.against.resolve(), HERE), outs)
                found = compare(*outs)
            except subprocess.CalledProcessError as error:
                found = [str(error)]
            differs = differs or bool(found)
            said = f"{name}: {f'{len(found)} differences' if found else 'bit-equal'}"
            print(f"{said} ({time.monotonic() - began:.0f} s)", *found[:20], sep="\n    ", flush=True)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
