"""Trains on one rank, then on ranks over a Ray cluster whose nodes have simulated devices, and compares the weights.

    python bench/scripts/ranks_over_nodes.py metaworld_pi0_tiny [--updates 10] [--json] [section.key=value ...]

Three nodes of two devices each, which are the chaos command's: all but the head have a network and a memory of their
own (root). Trainer ranks are on devices 0, 2, 4 and 5, generators on 1 and 3; lock-step, so that all runs have the same
samples. Then the same again, of replicas and of shards, while a node with a rank and a generator is lost after four
updates; a new node comes 5 s later. Exit status 1 if a weight differs by more than 1e-4 or is not finite, if a sample
was dropped or fewer were trained on, if no node was lost where one is to be, or if something is left on the nodes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from polyrhythm.config.load import load_config
from polyrhythm.pipeline.callbacks import Callbacks
from polyrhythm.pipeline.persistence.checkpoints import load_policy
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm_bench.chaos.nodes import ChaosNode, RayNodes

#: Largest difference of a weight to that of one rank.
ENOUGH = 1e-4
STRATEGIES = ("replicate", "shard")
NODES, CPUS, DEVICES = 3, 4, 2
_LOST_AT, _AWAY_S = 4, 5.0
_ONE = ("preset=lockstep", "rollout.generators=2", "evaluation.episodes=0")
_OVER_NODES = (
    "placement.trainer.devices=0,2,4,5",
    "placement.generators.devices=1,3",
    f"placement.simulated_devices={DEVICES}",
    "launcher=ray",
    "ray.strategy=spread",
    "ray.cpus_per_station=0.5",
    "supervision.heartbeat_s=8",
)


def trained(recipe: str, overrides: list[str], loss: Loss | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of a run, and its summary with the seconds that it took."""
    folder = Path(tempfile.mkdtemp(prefix="polyrhythm-ranks-"))
    checked = validate_run(load_config(recipe, overrides))
    began = time.monotonic()
    summary = train(checked, folder, callbacks=Callbacks([loss] if loss is not None else []))
    weights = load_policy(folder)[1]
    shutil.rmtree(folder)
    return weights, {**summary, "took_s": round(time.monotonic() - began, 1)}


class Loss:
    """Loses a node with a rank and a generator, but not rank 0, and starts a new one. what: was on it."""

    def __init__(self, nodes: RayNodes) -> None:
        self._nodes, self.what = nodes, list[str]()
        self._again: threading.Timer | None = None

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        if self.what or metrics["step"] < _LOST_AT:
            return
        there = {name: sorted(processes_of(node)) for name, node in self._nodes.nodes.items()}
        chosen = next(name for name, own in there.items() if is_mixed(own))
        node, self.what = self._nodes.nodes[chosen], there[chosen]
        self._nodes.lose(node)
        self._again = threading.Timer(_AWAY_S, self._nodes.start_node, [node])
        self._again.start()

    def finish(self) -> None:
        if self._again is not None:
            self._again.join()


def is_mixed(names: list[str]) -> bool:
    return "trainer" not in names and {name.partition("-")[0] for name in names} >= {"trainer", "generator"}


def processes_of(node: ChaosNode) -> Iterator[str]:
    """The names of the stations' processes there: the last word of their commands."""
    for pid in node.processes():
        words = psutil.Process(pid).cmdline()
        if words and words[-1].startswith(("trainer", "generator", "simulator")):
            yield words[-1]


def compare(recipe: str, updates: int, strategies: Sequence[str], overrides: list[str]) -> list[dict[str, Any]]:
    common = [*_ONE, f"training.versions={updates}", *overrides]
    one, summary = trained(recipe, [*common, "launcher=local"])
    trained_on = summary["ledger"]["trained"]
    rows = [{"run": "one rank", "took_s": summary["took_s"], "faults": 0, "difference": 0.0, "wrong": []}]
    with closing(RayNodes(NODES, CPUS, DEVICES)) as nodes:
        placed = [*common, *_OVER_NODES, f"ray.address={nodes.address}"]
        for strategy in strategies:
            for lost in (False, True):
                loss = Loss(nodes) if lost else None
                found, summary = trained(recipe, [*placed, f"placement.trainer.strategy={strategy}"], loss)
                if loss is not None:
                    loss.finish()
                nodes.revive()
                row = {
                    "run": f"four ranks, {strategy}" + ", a node lost" * lost,
                    "took_s": summary["took_s"],
                    "faults": len(summary["faults"]),
                    "lost": loss.what if loss is not None else [],
                    "hosts": {host: own["stations"] for host, own in summary.get("hosts", {}).items()},
                    "ledger": summary["ledger"],
                    "difference": largest_difference(found, one),
                    "left": nodes.remains(),
                }
                rows.append({**row, "wrong": problems(row, trained_on, loses=lost)})
    return rows


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of a weight; NaN if one is."""
    return float(torch.stack([(found[name] - x).abs().max().float() for name, x in expected.items()]).max())


def problems(row: Mapping[str, Any], trained_on: int, *, loses: bool) -> list[str]:
    """What is wrong with a run over nodes. trained_on: samples of the run of one rank; loses: a node is to be lost."""
    ledger = row["ledger"]
    checks = {
        f"a weight differs by {row['difference']:.1e}": not row["difference"] <= ENOUGH,
        f"{ledger['trained']} samples were trained on, not {trained_on}": ledger["trained"] != trained_on,
        f"samples were dropped: {ledger['dropped']}": bool(ledger["dropped"]),
        "no node was lost": loses and not (row["lost"] and row["faults"]),
        f"{row['faults']} faults": bool(row["faults"]) and not loses,
        f"left: {row['left']}": bool(row["left"]),
    }
    return [what for what, wrong in checks.items() if wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_intermixed_args()
    rows = compare(arguments.recipe, arguments.updates, arguments.strategies, arguments.overrides)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            wrong = "".join(f"; WRONG: {what}" for what in row["wrong"])
            print(f"{row['run']}: {row['difference']:.1e}, {row['faults']} faults, {row['took_s']} s{wrong}")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
