"""`polyrhythm train RECIPE --slurm …` and `--kuberay …`: check the recipe for the nodes that are asked for, write the
job into the run's folder, and submit it. Nothing is trained here.

The recipe is saved with the job as it was checked: editing it while the job waits changes nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from polyrhythm.plugin import import_address

if TYPE_CHECKING:
    from polyrhythm.checks import Examined
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.plugins.cluster.submit.job import Submission, TrainingJob
    from polyrhythm.plugins.cluster.submit.options import JobSettings

#: Keys of each option; `options.py` has their meaning and imports pydantic, which the help does without.
KEYS = {
    "slurm": ("nodes", "cpus", "gpus", "mem", "time", "partition", "account", "qos", "setup"),
    "kuberay": ("nodes", "cpus", "image", "claim", "gpus", "mem", "namespace"),
}


class JobQueue(Protocol):
    """A kind of job, the module of its option. HERE: its nodes have the files and packages of this machine, else those
    of an image. SETTINGS: what its option takes."""

    HERE: bool
    SETTINGS: type[JobSettings]

    def paths(self, recipe: Path, folder: Path) -> tuple[str, str]:
        """The file of the run's settings and the run's folder, as the nodes see them."""

    def write(self, job: TrainingJob, settings: Any) -> Path:
        """Write the job's file."""

    def submit(self, file: Path, settings: Any) -> Submission:
        """Submit it. StartError: the queue refuses it, or is not reached from here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("in a cluster's queue", "docs/clusters.md has the keys, and what is written.")
    queue = group.add_mutually_exclusive_group()
    for option, keys in KEYS.items():
        queue.add_argument(f"--{option}", metavar="KEY=VALUE,…", help=f"submit a job; keys: {', '.join(keys)}")
    group.add_argument("--dry-run", action="store_true", help="write the job, and do not submit it")


def run(arguments: argparse.Namespace) -> int | None:
    """Submit a job; None: the user asks for none."""
    option = next((option for option in KEYS if getattr(arguments, option) is not None), None)
    if option is None:
        if arguments.dry_run:
            arguments.usage_error("--dry-run belongs to --slurm and --kuberay; to check a recipe write --check")
        return None
    from polyrhythm.cli.train import print_findings
    from polyrhythm.config.load import load_config
    from polyrhythm.pipeline.persistence.resume_rules import new_folder, started
    from polyrhythm.plugins.cluster.submit import job as jobs
    from polyrhythm.plugins.cluster.submit.options import parse_job

    queue: JobQueue = import_address(f"polyrhythm.plugins.cluster.submit.{option}")
    settings = parse_job(option, getattr(arguments, option), queue.SETTINGS)
    overrides = jobs.overrides_for(option, settings.nodes, arguments.overrides, ray=not queue.HERE)
    config = load_config(arguments.recipe, overrides)
    config, begun = started(config, arguments.out, jobs.devices_of(config, settings))
    found = list(jobs.examine_job(config, settings, option, here=queue.HERE))
    if arguments.check:
        return print_findings(found, as_json=arguments.json, ready="ready to submit; nothing was submitted")
    _refuse(found)
    folder = (begun or new_folder(config, arguments.out)).absolute()
    job = _prepare(arguments, config, settings, queue, option, folder)
    file = queue.write(job, settings)
    _report(arguments, job, file, None if arguments.dry_run else queue.submit(file, settings))
    return 0


def _refuse(found: list[Examined]) -> None:
    """Print notes. ConfigError: the job could not train."""
    from polyrhythm.cli import show
    from polyrhythm.errors import ConfigError

    if problems := [one for _, one in found if one.state in ("failed", "missing")]:
        raise ConfigError(*("; ".join(filter(None, (one.detail, one.fix))) for one in problems))
    for _, one in found:
        if one.state == "note":
            print(show.finding_line(one, encoding=sys.stderr.encoding), file=sys.stderr)


def _prepare(
    arguments: argparse.Namespace, config: RunConfig, settings: JobSettings, queue: JobQueue, option: str, folder: Path
) -> TrainingJob:
    """The job. The run's folder then has a folder with the job's files, of which the run's settings are written."""
    from polyrhythm.config.load import save_config
    from polyrhythm.observe.run_folder import JOB_FOLDER
    from polyrhythm.plugins.cluster.submit.job import TrainingJob, cpus_of_node, place_job

    files = folder / JOB_FOLDER
    files.mkdir(exist_ok=True)
    recipe = files / f"{config.name}.yaml"
    save_config(config.model_copy(update={"resume": "never"}), recipe)
    seen, out = queue.paths(recipe, folder)
    given = ["polyrhythm", "train", arguments.recipe, *arguments.overrides, f"--{option}", getattr(arguments, option)]
    return TrainingJob(
        name=config.name,
        words=("polyrhythm", "train", seen, "--out", out, "resume=auto"),
        cpus=cpus_of_node(config, settings, option, place_job(config, settings, option)),
        recipe=recipe,
        out=out,
        over_ray=config.launcher == "ray" and config.ray.address == "auto",
        given=" ".join(shlex.join(given).split()),
    )


def _report(arguments: argparse.Namespace, job: TrainingJob, file: Path, submission: Submission | None) -> None:
    if arguments.json:
        queued = {} if submission is None else submission._asdict()
        print(json.dumps({"file": str(file), "folder": job.out, **queued}, indent=2))
        return
    lines = [("folder", job.out), ("file", str(file))]
    if submission is not None:
        watch = [("watch", command) for command in submission.watch]
        lines = [("job", submission.job), *lines, *watch, ("cancel", submission.cancel)]
    print(*(f"{name:8}{value}" for name, value in lines), sep="\n")
    if submission is None:
        print("nothing was submitted (--dry-run)")
