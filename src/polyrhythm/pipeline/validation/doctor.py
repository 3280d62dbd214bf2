"""Checks whether this machine can run the quickstart, by trying each part, and names the command that fixes a failure.

Nothing here prompts; a failed check does not stop the others. Other modules are imported inside the checks, since the
packages that they need may be missing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Literal, NamedTuple

from polyrhythm.errors import PolyrhythmError, install_command
from polyrhythm.imports import same_imports

RECIPE, _EXTRA = "quickstart", "metaworld"
#: Bytes of memory for the quickstart's processes (1.1 GB measured on 2 cores), with some margin.
MEMORY_BYTES = 1_500_000_000
#: Debian packages for rendering without a screen; tools/render_libs.sh installs the same.
RENDER_PACKAGES = "libosmesa6 libgl1 libegl1"

_PYTHON = (3, 11)
_TASK = "door-close-v3"
_RENDER_S, _START_S, _MESSAGE_S = 120.0, 60.0, 5.0


class Finding(NamedTuple):
    """The result of one check. missing: the quickstart cannot run; note: it can. fix: a command, "" for none."""

    name: str
    state: Literal["ok", "note", "missing"]
    detail: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """The fields by name. `said` and `mend` are older names of `detail` and `fix`, kept for scripts."""
        return {**self._asdict(), "said": self.detail, "mend": self.fix}


def examine() -> Iterator[Finding]:
    """Run all checks; yield each result as soon as it is known. Rendering, which takes seconds, comes last."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": _python,
        "packages": _packages,
        "torch": _torch,
        "cores": _cores,
        "memory": _memory,
        "leftovers": _leftovers,
        "shared memory": _shared_memory,
        "processes": _processes,
        "messages": _messages,
    }
    for backend, needed in _backends().items():
        checks[f"rendering {backend}"] = lambda b=backend, n=needed: _rendering(b, needed=n)  # type: ignore[misc]
    told: dict[str, str] = {}  # message → the first check that raised it
    for name, check in checks.items():
        try:
            yield check()._replace(name=name)
        except (PolyrhythmError, ImportError, OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            first = told.setdefault(str(error), name) if isinstance(error, PolyrhythmError) else name
            if first != name:
                yield Finding(name, "missing", f"could not be checked, for the same reason as {first}")
                continue
            fix = install_command(_EXTRA) if isinstance(error, ImportError) else ""
            yield Finding(name, "missing", f"{type(error).__name__}: {error}", fix)


def examine_env(name: str) -> Iterator[Finding]:
    """Run the checks of an environment: its packages, then what its settings class finds of this machine.

    That class may have a class method `findings()`, which yields `conformance.Finding`s, the slow ones last.
    Raises ConfigError if there is no such environment.
    """
    from polyrhythm.config.catalog import adapter
    from polyrhythm.config.registry import settings_class

    found = adapter("env", name)
    versions = [f"{need.package} {need.version}".strip() for need in found.needs if need.found]
    missing = [need.package for need in found.needs if not need.found]
    if missing:
        clash = f"; {found.clash}" if found.clash else ""
        yield Finding("packages", "missing", f"missing: {', '.join(missing)}{clash}", found.install)
        return
    yield Finding("packages", "ok", ", ".join(versions) or "none needed")
    own = getattr(settings_class("env", name), "findings", None)
    if own is None:
        yield Finding("other checks", "note", f"{name} declares none; polyrhythm check RECIPE tries it")
        return
    for seen in own():
        state: Literal["ok", "note", "missing"] = "missing" if seen.state == "failed" else seen.state
        yield Finding(seen.name, state, seen.detail, seen.fix)


def _python() -> Finding:
    wanted = ".".join(map(str, _PYTHON))
    detail = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info >= _PYTHON:
        return Finding("", "ok", detail)
    fix = f"(with your system's package manager) install Python {wanted}, and this package into it"
    return Finding("", "missing", f"{detail}; {wanted} or newer is needed", fix)


def _packages() -> Finding:
    try:
        requirements = metadata.requires("polyrhythm") or []
    except metadata.PackageNotFoundError:
        return Finding("", "note", "polyrhythm runs from its sources and is not installed", install_command(_EXTRA))
    wanted = [line for line in requirements if "extra ==" not in line or "metaworld" in line.partition("extra ==")[2]]
    there, missing, unfit = [], [], []
    for line in wanted:
        name = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        there.append(f"{name} {version}")
        if not _satisfies(line, version):
            unfit.append(f"{name} {version} (wanted {line.partition(';')[0].strip()})")
    if missing or unfit:
        parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unfit: {', '.join(unfit)}"] * bool(unfit)
        return Finding("", "missing", "; ".join(parts), install_command(_EXTRA))
    return Finding("", "ok", ", ".join(there))


def _satisfies(requirement: str, version: str) -> bool:
    """Whether the version is in the requirement's range; True if `packaging` is not installed."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _torch() -> Finding:
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    seen = f"CUDA {torch.version.cuda}: {', '.join(devices)}" if devices else "no CUDA device (none is needed)"
    return Finding("", "ok", f"{torch.__version__}, {seen}")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    detail = f"{cores} available, OMP_NUM_THREADS {threads or 'not set'}"
    if threads.isdecimal() and int(threads) > cores:
        detail = f"{detail}: more threads than cores are many times slower"
        return Finding("", "note", detail, "export OMP_NUM_THREADS=1")
    if cores < 2:
        return Finding("", "note", f"{detail}; simulation and training share one core")
    return Finding("", "ok", detail)


def _memory() -> Finding:
    from polyrhythm.pipeline.validation.room import free_memory

    free = free_memory()
    detail = f"{_gigabytes(free)} free, the quickstart takes about {_gigabytes(MEMORY_BYTES)}"
    if free < MEMORY_BYTES:
        return Finding("", "missing", f"{detail}; end other programs, or use fewer rows (rollout.rows)")
    return Finding("", "ok", detail)


def _leftovers() -> Finding:
    from polyrhythm.runtime.memory.shared_folder import remove_orphans

    removed = remove_orphans()
    if removed:
        return Finding("", "ok", f"removed the shared memory of {len(removed)} dead runs")
    return Finding("", "ok", "no shared memory of dead runs")


def _shared_memory() -> Finding:
    from polyrhythm.config.load import load_config
    from polyrhythm.pipeline.build import env_settings, policy_settings
    from polyrhythm.pipeline.validation.check import shared_sizes
    from polyrhythm.runtime.memory.shared_folder import shared_root

    config = load_config(RECIPE)
    spec = env_settings(config).spec()
    wanted = sum(shared_sizes(config, spec, policy_settings(config).form(spec)).values())
    root = shared_root()
    free = shutil.disk_usage(root).free
    detail = f"{_gigabytes(free)} free in {root}, the quickstart takes {wanted / 1e6:.0f} MB"
    if free >= wanted:
        return Finding("", "ok", detail)
    remount = f"mount -o remount,size={-(-wanted // 10**9) * 2}G {root}"
    return Finding("", "missing", f"{detail}; in a container: --shm-size", f"{_as_root()}{remount}")


def _processes() -> Finding:
    done = subprocess.run(
        [sys.executable, "-c", "print(6 * 7)"],
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.stdout.strip() == "42":
        return Finding("", "ok", "another process can be started")
    return Finding("", "missing", f"a process that was started ended with {done.returncode}: {_last(done.stderr)}")


def _messages() -> Finding:
    import zmq

    from polyrhythm.runtime.memory.shared_folder import SharedRunFolder, shared_root
    from polyrhythm.runtime.transport.sockets import Inbox, Outbox, endpoint

    memory, context = SharedRunFolder({"probe": 4096}, shared_root()), zmq.Context()
    try:
        inbox = Inbox(context, endpoint("ipc", str(memory.folder), "doctor"))
        outbox = Outbox(context, inbox.endpoint)
        outbox.send(b"probe")
        received = inbox.receive(_MESSAGE_S)
        outbox.close()
        inbox.close()
    finally:
        context.term()
        memory.remove()
    if received == b"probe":
        return Finding("", "ok", f"ZeroMQ {zmq.zmq_version()} over ipc in {memory.folder.parent}")
    return Finding("", "missing", f"no message came through {inbox.endpoint}; set data_plane.transport=tcp")


def _backends() -> dict[str, bool]:
    """GL backend to try → whether the quickstart would use it: MUJOCO_GL, else as `choose_gl_backend` chooses."""
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    try:
        from polyrhythm.envs.mujoco import BACKENDS, is_loadable, preferred
    except ImportError:
        return {chosen or "osmesa": True}
    chosen = chosen or preferred(tuple(filter(is_loadable, BACKENDS)) or BACKENDS[:1])
    return {chosen: True} | {name: False for name in BACKENDS if name != chosen}


def _rendering(backend: str, *, needed: bool) -> Finding:
    bad: Literal["note", "missing"] = "missing" if needed else "note"
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "polyrhythm.plugins.simulators.metaworld.render_probe", _TASK],
            capture_output=True,
            text=True,
            timeout=_RENDER_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **same_imports(), "MUJOCO_GL": backend},
        )
    except subprocess.TimeoutExpired:
        return Finding("", bad, f"no frame of {_TASK} within {_RENDER_S:.0f} s", _render_fix(backend))
    if done.returncode:
        why = _last(done.stderr).partition("; run:")[0]
        fix = install_command(_EXTRA) if "No module named" in why else _render_fix(backend)
        return Finding("", bad, f"no frame of {_TASK}: {why}", fix)
    drawn = json.loads(done.stdout.splitlines()[-1])
    if drawn["shades"] < 2:
        return Finding("", bad, f"a frame of {_TASK} is blank", _render_fix(backend))
    used = "" if needed else "; not used here"
    return Finding("", "ok", f"a frame of {_TASK} in {drawn['frame_ms']:.0f} ms{used}")


def _render_fix(backend: str) -> str:
    """Command that enables rendering without a screen."""
    if backend not in ("osmesa", "egl"):
        return "unset MUJOCO_GL"
    if not shutil.which("apt-get"):
        return f"(with your system's package manager) install OSMesa and EGL, on Debian {RENDER_PACKAGES}"
    return f"{_as_root()}apt-get install -y {RENDER_PACKAGES}"


def _as_root() -> str:
    return "" if os.getuid() == 0 else "sudo "


def _last(text: str) -> str:
    """The last line that is not empty, before Python's messages at exit."""
    lines = [line.strip() for line in text.partition("Exception ignored")[0].splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
