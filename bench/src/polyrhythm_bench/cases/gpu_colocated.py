"""Full-size π0 with Meta-World and training on one GPU: table 5 of the RL-VLA³ paper on one machine, and other ways of
sharing the device.

    lockstep            all env batches wait for each other, and the rollout for the update
    rollout_async       passes serve half of the rows at a time, while the others step
    train_async         the update overlaps the next rollout
    full_async          both
    lockstep_leased     as lockstep, generator and trainer hold the device in turn; on a CPU as lockstep
    full_async_process  as full_async, generator and trainer in one process, each on a stream of its own
    full_async_mps      as full_async, generator and trainer under NVIDIA's MPS; not on a CPU
    full_async_unlent   as full_async, frozen prefixes computed by the trainer instead of lent by the generator

On a GPU each mode is run with frames drawn on the cores (osmesa) and on the device (egl): rows MODE-osmesa, MODE-egl,
those first that say most.

Each mode is a training run by `pipeline.train`, the code of `polyrhythm train`, in processes: simulators on the cores,
generator and trainer on the device, weights random, `train: expert`. What is left out is the trial of environment and
policy before the start, and the modes share one policy of the main process. Transitions per second are counted from the
second update to the last.

A row's result is written to the folder when it ends, and a row that is there is not repeated, so that the command can
be interrupted and called again. The time is divided over the rows that are left, as many as have the time that a row
needs.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

from polyrhythm.checks import CheckContext
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline import train as running
from polyrhythm.pipeline.callbacks import Callbacks, StopTraining
from polyrhythm.pipeline.validation import check as checking
from polyrhythm.pipeline.validation.check import ValidatedRun
from polyrhythm.pipeline.validation.fit import check_rollout
from polyrhythm.policies.base import Policy
from polyrhythm.policies.form import PolicyForm
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.kept import KeptResults
from polyrhythm_bench.workloads import colocated
from polyrhythm_bench.workloads.colocated import Scene

log = logging.getLogger(__name__)

#: Gain of full asynchrony over the best lock-step in the paper's table 5, colocated: 268.00 over 144.70.
PAPER_GAIN = 1.852
#: Device memory in GiB beside the plan, for activations, graphs and contexts; updates of a mode at least.
REST_GIB, _UPDATES = 20.0, 3


def run(out: Path, minutes: float = 8.0, *, tiny: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """All rows that the folder lacks, or those of `only`, in so many minutes together.

    Returns the scene; `memory_plan_gib`, what is on the device by purpose; the paper's gain, and ours: the best
    fully asynchronous row over the best of lock-step (None before there are both); `missing`, the rows that are not
    finished and what to do; `modes`: for each row transitions_per_s, gain over that lock-step, and what `Pace.summary`
    says.
    ConfigError: no device, a device that is too small, or results of another scene in the folder.
    """
    ends = time.monotonic() + 60.0 * minutes
    scene = colocated.scene_of(tiny=tiny)
    _check_device(scene)
    form, results = form_of(colocated.config_of(scene, "lockstep", None)), kept(out, scene)
    rows = {name: row for name, row in colocated.rows_of(scene).items() if not only or name in only}
    plan = colocated.memory_plan(scene, form)
    _check_device(scene, sum(plan.values()))
    if left := {name: row for name, row in rows.items() if results.read(name) is None}:
        out.mkdir(parents=True, exist_ok=True)
        _run_rows(scene, results, out, left, ends)
    found = {name: one for name in rows if (one := results.read(name)) is not None}
    return summarise(scene, rows, found, plan)


def summarise(
    scene: Scene, rows: Mapping[str, tuple[str, str]], found: Mapping[str, Mapping[str, Any]], plan: Mapping[str, float]
) -> dict[str, Any]:
    """The result from those of these rows."""
    rates = {name: one["transitions_per_s"] for name, one in found.items()}
    first = max((rate for name, rate in rates.items() if rows[name][0] == "lockstep"), default=None)
    best = max((rate for name, rate in rates.items() if rows[name][0].startswith("full_async")), default=None)
    modes = {name: {**found[name], "gain": rates[name] / first if first else None} for name in rows if name in found}
    missing = [name for name in rows if name not in found]
    reasons = {name: colocated.why_not(*rows[name]) for name in missing}
    late = [name for name in missing if not reasons[name]]
    said = f"not finished in the time: {', '.join(late)}; call it again with the same --out" if late else ""
    skipped = ", ".join(f"{name} ({why})" for name, why in reasons.items() if why)
    said += f"{'; ' * bool(said)}not possible here: {skipped}" if skipped else ""
    return {
        **scene._asdict(),
        "memory_plan_gib": [{"purpose": name, "gib": gib} for name, gib in {**plan, "all": sum(plan.values())}.items()],
        "paper_gain": PAPER_GAIN,
        "gain": best / first if best and first else None,
        "missing": said,
        "modes": modes,
    }


def kept(out: Path, scene: Scene) -> KeptResults:
    """The results of rows."""
    return KeptResults(out, identity(scene))


def identity(scene: Scene) -> dict[str, Any]:
    name = torch.cuda.get_device_name(0) if scene.device == "cuda" else "cpu"
    return {**scene._asdict(), "device": name, "cores": psutil.cpu_count()}


def _check_device(scene: Scene, planned_gib: float = 0.0) -> None:
    if scene.device == "cpu":
        return
    small = "or add --tiny for a small policy on the CPU"
    if not torch.cuda.is_available():
        raise ConfigError(f"bench gpu-colocated: torch sees no CUDA device here; run it where there is one, {small}")
    there, needed = torch.cuda.mem_get_info(0)[1] / 2**30, planned_gib + REST_GIB
    if there < needed:
        raise ConfigError(
            f"bench gpu-colocated: device 0 has {there:.0f} GiB and about {needed:.0f} are needed; use another one "
            f"(CUDA_VISIBLE_DEVICES), {small}"
        )


def _run_rows(
    scene: Scene,
    results: KeptResults,
    out: Path,
    left: Mapping[str, tuple[str, str]],
    ends: float,
) -> None:
    """Run these rows as far as the time goes, and keep their results. The checkpoint is removed after the last one."""
    possible = {name: row for name, row in left.items() if not colocated.why_not(*row)}
    if not possible:
        return
    checkpoint = out / "checkpoint"
    if not checkpoint.is_dir():
        log.info("a checkpoint with random weights")
        colocated.make_checkpoint(scene, checkpoint)
    first = colocated.config_of(scene, "lockstep", checkpoint)
    policy, form = checking.check_build(first, checking.installed_env(first).spec()), form_of(first)
    for number, (name, (mode, gl)) in enumerate(possible.items()):
        now = time.monotonic()
        if ends - now < scene.minimum_s:
            break
        stops = now + max(scene.minimum_s, (ends - now) / (len(possible) - number)) - scene.ending_s
        config = colocated.config_of(scene, mode, checkpoint)
        log.info("%s: %.0f s", name, stops - now)
        pace = Pace(stops, scene.device)
        with _drawn_by(gl):
            _train(_checked(config, policy, form), out / f"run-{name}", pace, ends)
        if len(pace.marks) < 2:
            log.warning("%s: %d updates in the time", name, len(pace.marks))
            continue
        results.write(name, pace.summary())
    every = [name for name, row in colocated.rows_of(scene).items() if not colocated.why_not(*row)]
    if all(results.read(name) for name in every):
        shutil.rmtree(checkpoint)


@contextmanager
def _drawn_by(gl: str) -> Iterator[None]:
    """Within the block simulators that start draw with this backend; "": with whatever is chosen."""
    before = os.environ.get("MUJOCO_GL")
    if gl:
        os.environ["MUJOCO_GL"] = gl
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("MUJOCO_GL", None)
        else:
            os.environ["MUJOCO_GL"] = before


def form_of(config: RunConfig) -> PolicyForm:
    return checking.check_form(config, checking.installed_env(config).spec())


def _checked(config: RunConfig, policy: Policy, form: PolicyForm) -> ValidatedRun:
    """`validate_run` without the trial of environment and policy, and with a policy that is there."""
    context = CheckContext(config, spec=checking.installed_env(config).spec(), form=form)
    checking.check_devices(context)
    check_rollout(config, context.spec)
    checking.check_processes(context)
    checking.check_memory(context)
    return ValidatedRun(config, context.spec, policy)


def _train(checked: ValidatedRun, folder: Path, pace: Pace, ends: float) -> None:
    """Train in the folder until the pace says so, or the whole time is over; the folder is removed."""
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed
    folder.mkdir()
    try:
        with time_limit(ends - time.monotonic()), suppress(StopTraining):
            running.train(checked, folder, callbacks=Callbacks(pace.on_update))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block after so long, as SIGTERM ends a run: in order."""
    over = threading.Event()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def fire() -> None:
        over.set()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(max(seconds, 0.1), fire)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        timer.start()
        yield
    except KeyboardInterrupt:
        if not over.is_set():
            raise
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True)
class Pace:
    """Stops a run at the time `stops` of `time.monotonic`, after a few updates at least, and keeps their metrics."""

    stops: float
    device: str
    marks: list[Mapping[str, float]] = field(default_factory=list)
    used_gib: list[float] = field(default_factory=list)
    cpu: list[resources.CpuReading] = field(default_factory=list)

    def on_update(self, metrics: Mapping[str, float]) -> None:
        """The callback of the run."""
        self.marks.append(dict(metrics))
        self.cpu.append(resources.read_cpu())
        if self.device == "cuda" and (used := _used_gib()) is not None:
            self.used_gib.append(used)
        if time.monotonic() >= self.stops and len(self.marks) >= _UPDATES:
            raise StopTraining

    def summary(self) -> dict[str, Any]:
        """transitions_per_s from the second update (of two, the first) to the last; versions and seconds in between;
        lag_mean, and utilisation by station over them; others_cores, which everything else on the machine used; rates
        by version; device_gib, the most in use."""
        first = 1 if len(self.marks) > 2 else 0
        counted = self.marks[first:]
        begin, end = counted[0], counted[-1]
        seconds = end["time_s"] - begin["time_s"]
        rates = [mark["throughput/transitions_per_s"] for mark in counted[1:]]
        busy = sorted({name for mark in counted for name in mark if name.startswith("stations/utilisation/")})
        return {
            "transitions_per_s": (end["throughput/transitions"] - begin["throughput/transitions"]) / seconds,
            "versions": len(counted) - 1,
            "seconds": seconds,
            "lag_mean": fmean(mark["staleness/lag_mean"] for mark in counted[1:]),
            "faults": end["stations/faults"],
            "others_cores": resources.others_cores(self.cpu[first], self.cpu[-1]),
            "device_gib": max(self.used_gib, default=None),
            "busy": {name.rpartition("/")[2]: fmean(mark.get(name, 0.0) for mark in counted[1:]) for name in busy},
            "rates_by_version": rates,
        }


def _used_gib() -> float | None:
    """Memory in use on device 0, of all processes; None if nvidia-smi does not say."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603
        return float(said.stdout.split()[0]) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
