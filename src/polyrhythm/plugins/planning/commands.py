"""The command `plan`, without what it needs to run, so that its help is quick; its docstring is its help."""

from __future__ import annotations

import argparse

from polyrhythm.cli.arguments import count
from polyrhythm.plugins.memory_estimate import command as plan_memory


class Plan:
    """Find the fastest placement of a RECIPE; say what limited a finished RUN; or predict what asynchronous training
    gains, or what memory a run takes.

    --gpus N: search placements on N GPUs, by a profile of the recipe (`polyrhythm profile RECIPE`) and the simulated
    cluster: a ranked table, the settings to paste, and what more devices, generators or rows would buy. For
    FILE.py:function, which runs a workflow of yours: which of its workers share devices and which stand apart.
    --theory: time per version, and how to split the workers, with the bounds of ROLL Flash, section 3.1. Stage times
    come from the options or from a finished RUN; options override measured times. Example: --samples 256 --workers 40
    --rollout lognormal:60s:0.8 --train 12s --max-lag 2
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.usage = (
            "%(prog)s [-h] [--json] (RECIPE --gpus N [--nodes M] [--profile FILE] [section.key=value ...] | "
            "FILE.py:function --gpus N [name=value ...] | RUN | "
            "--theory [...] [RUN] | --memory [...] RECIPE [section.key=value ...])"
        )
        parser.add_argument("run", nargs="?", metavar="RUN", help="folder of a finished run, or a recipe")
        parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="a recipe's settings")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--gpus", metavar="N", help="find a placement on N GPUs in all; 4,0: by node")
        what.add_argument("--theory", action="store_true", help="use the theoretical bounds")
        what.add_argument("--memory", action="store_true", help="what a run would take on each device")
        parser.add_argument("--nodes", type=count, metavar="M", help="--gpus: spread over M equal nodes (default: 1)")
        parser.add_argument(
            "--profile", metavar="FILE", help="--gpus: measured times of the recipe (default: RECIPE.profile.json)"
        )
        plan_memory.add_arguments(parser)
        parser.add_argument("--samples", type=count, metavar="N", help="samples per version")
        parser.add_argument("--workers", type=count, metavar="K", help="equal workers that generate or train")
        parser.add_argument(
            "--rollout", metavar="DIST", help="time of a sample on one worker: 60s, or lognormal:60s:0.8"
        )
        parser.add_argument("--longest", metavar="TIME", help="longest sample (default: expected maximum)")
        parser.add_argument("--train", metavar="TIME", help="training on one sample once, on one worker: 12s")
        parser.add_argument("--epochs", type=count, metavar="E", help="training passes over each sample (default: 1)")
        parser.add_argument("--max-lag", type=float, metavar="A", help="versions that a sample may be behind (real)")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        from polyrhythm.plugins.planning.command import run

        return run(arguments)
