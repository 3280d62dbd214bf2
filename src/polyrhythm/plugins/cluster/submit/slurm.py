"""A job of Slurm: its script, and `sbatch`.

    sbatch job.sh ─▶ srun on every node: ray symmetric-run ─▶ on the first one: polyrhythm train --out RUN resume=auto

A job of one node has no Ray: the run starts its processes itself. A requeued job keeps its folder, and so its run.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.submit.job import Submission, TrainingJob, ask
from polyrhythm.plugins.cluster.submit.options import SIGNAL_S, SlurmSettings

HERE, SETTINGS = True, SlurmSettings
#: Port of Ray's head on the first node. A job has its nodes for itself, so no other Ray is there.
_PORT = 6390


def paths(recipe: Path, folder: Path) -> tuple[str, str]:
    """Nodes see the same files."""
    return str(recipe), str(folder)


def write(job: TrainingJob, settings: SlurmSettings) -> Path:
    """Write the script and, for Ray, a token of the job's own."""
    if job.over_ray:
        token = job.recipe.with_name("ray_token")
        if not token.exists():
            with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
    script = job.recipe.with_name("job.sh")
    script.write_text(script_of(job, settings, str(Path.cwd()), str(Path(sys.executable).parent)), encoding="utf-8")
    return script


def submit(script: Path, settings: SlurmSettings) -> Submission:  # noqa: ARG001 (those of all queues)
    """Have Slurm check the script, and put it into the queue. StartError: it is refused, or Slurm is not here."""
    if shutil.which("sbatch") is None:
        raise StartError(
            f"--slurm: sbatch is not found on this machine; the job is written: {script}; submit it where Slurm is: "
            f"sbatch {shlex.quote(str(script))}"
        )
    ask(["sbatch", "--test-only", str(script)], script)
    job = ask(["sbatch", "--parsable", str(script)], script).strip().partition(";")[0]
    output = shlex.quote(str(script.with_name(f"slurm-{job}.log")))
    return Submission(job, (f"squeue --job {job}", f"tail -F {output}"), f"scancel {job}")


def script_of(job: TrainingJob, settings: SlurmSettings, cwd: str, python: str) -> str:
    """The script. cwd: of the user, so that relative paths mean the same; python: folder of this Python's commands."""
    options = "\n".join(f"#SBATCH --{option}" for option in _options(job, settings, cwd))
    setup = f"source {shlex.quote(settings.setup)}\n" if settings.setup else ""
    return f"""#!/bin/bash
# {job.given}
# The job goes back into the queue when a node is lost or it is preempted (--requeue), and by the signal that it gets
# {SIGNAL_S} s before its time is up. It then goes on with the run in its folder (resume=auto).
{options}
{setup}set -euo pipefail
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
export PATH={shlex.quote(python)}:"$PATH"
{_on_ray(job, settings) if job.over_ray else _alone(job)} &
wait $!
"""


def _options(job: TrainingJob, settings: SlurmSettings, cwd: str) -> Iterator[str]:
    yield f"job-name={job.name}"
    yield f"nodes={settings.nodes}"
    yield "ntasks-per-node=1"
    yield f"cpus-per-task={job.cpus}"
    if settings.devices:
        yield f"gpus-per-node={settings.gpus}"
    if job.over_ray:
        yield "exclusive"  # `ray symmetric-run` ends by `ray stop`, which ends every Ray of the user on the node
    if memory := settings.mem or "0" * job.over_ray:
        yield f"mem={memory}"
    for key in ("time", "partition", "account", "qos"):
        if value := getattr(settings, key):
            yield f"{key}={value}"
    yield f"chdir={shlex.quote(cwd)}"
    output = str(job.recipe.with_name("slurm-")).replace("%", "%%")
    yield f"output={shlex.quote(f'{output}%j.log')}"
    yield "open-mode=append"
    yield "requeue"
    yield f"signal=B:USR1@{SIGNAL_S}"


def _alone(job: TrainingJob) -> str:
    return f"srun --cpus-per-task {job.cpus} {job.command}"


def _on_ray(job: TrainingJob, settings: SlurmSettings) -> str:
    token = shlex.quote(str(job.recipe.with_name("ray_token")))
    return f"""export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}
export RAY_worker_niceness=0    # else stations have a nice value of 15
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
address=$(getent ahostsv4 "$head" | awk 'NR == 1 {{print $1}}'):{_PORT}

# One command on every node: it starts Ray, and on the first node then the run; when that ends, Ray ends everywhere.
srun --cpus-per-task {job.cpus} ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \\
  --num-cpus {job.cpus} --num-gpus {settings.devices} -- \\
  {job.command}"""
