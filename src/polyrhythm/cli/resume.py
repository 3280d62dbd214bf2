"""Resume a run in its own folder: an interrupted one, or, with more versions to train, a finished one.

It keeps its settings. Some may be changed, which is recorded in the folder and marked in the report:

training.versions, training.optimizer.lr, training.optimizer.lr_final_fraction, training.optimizer.value_lr,
training.optimizer.warmup_updates, training.optimizer.warmup_steps; evaluation, checkpoint, prometheus,
tracking;

where and how it runs: launcher, ray, placement, data_plane, supervision, shutdown_s, policy.engine,
rollout.reset_ahead, scoring.processes, scoring.at_a_time, scoring.try_first, join.address, join.port,
join.min_simulators, join.reconnect_s, training.optimizer.offload, training.precomputed_mib;

what ends it: rollout.max_attempts, rollout.max_dropped, rollout.quarantine_after, scoring.max_attempts,
training.on_nonfinite_gradient, training.max_skipped_steps;

where its released folders are, if they were moved: policy.checkpoint, policy.tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from polyrhythm.plugin import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [-h] [--json] RUN [section.key=value ...]"
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, or of runs: the newest")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings that change from here on, such as training.versions",
    )
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # accepted only to refuse it with a reason
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.observe.run_folder import find_run
    from polyrhythm.pipeline.persistence.phases import command_of
    from polyrhythm.pipeline.persistence.resume_rules import (
        config_to_resume,
        goes_on_where_it_is,
        naming_where_it_began,
    )

    folder = find_run(arguments.run_folder)
    if arguments.out is not None:
        raise goes_on_where_it_is(f"--out {arguments.out}", folder, "--out")
    config = config_to_resume(folder, arguments.overrides)
    if command_of(folder) == "sft":
        status: int = load("command", "sft").imitate_in(folder, config, as_json=arguments.json)
        return status
    from polyrhythm.cli import train
    from polyrhythm.pipeline.validation.check import validate_run

    with naming_where_it_began(folder):
        checked = validate_run(config, begun=True)
    return train.train_in(folder, checked, as_json=arguments.json)
