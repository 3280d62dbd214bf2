"""Check whether this machine can run the quickstart, by trying each part; name what is missing and how to fix it.

With ENV, such as `maniskill`: check instead what this environment needs. Exit status 0 if it can run, 1 otherwise.

--bundle writes one archive for a bug report: the findings, versions, and with --run a run's settings and ends of its
logs; secrets are taken out, weights and data left out. Read it before you send it.
"""

# Nothing here prompts; a failed check does not stop the others. Modules whose packages may be missing are imported
# inside the checks.

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from polyrhythm.checks import Check, added
from polyrhythm.conformance import Finding, last_line
from polyrhythm.error_codes import code_of
from polyrhythm.errors import ConfigError, PolyrhythmError, as_root, install_command
from polyrhythm.imports import count_cores

RECIPE, _EXTRA = "quickstart", "metaworld"
#: Bytes of memory for the quickstart's processes (1.1 GB measured on 2 cores), with some margin.
MEMORY_BYTES = 1_500_000_000

_PYTHON = (3, 11)
_START_S, _MESSAGE_S = 60.0, 5.0
#: Check → code of what it finds missing; of any other, that of a simulator.
_CODES = {
    "python": "PR201",
    "packages": "PR201",
    "torch": "PR201",
    "memory": "PR402",
    "shared memory": "PR402",
    "processes": "PR403",
    "messages": "PR404",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", nargs="?", metavar="ENV", help="an environment's type (also: module:Class)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--bundle", type=Path, metavar="FILE.tar.gz", help="write an archive for a bug report")
    parser.add_argument("--run", type=Path, metavar="RUN", help="with --bundle: the run that it is about")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.observe.run_folder import CONFIG_FILE, find_run, take_file

    bundle, about = arguments.bundle, arguments.run
    if about is not None:
        if bundle is None:
            raise ConfigError(f"--run = {about}: it belongs to --bundle FILE.tar.gz; add that")
        about = find_run(about)
        if not (about / CONFIG_FILE).is_file():
            raise ConfigError(f"--run = {arguments.run}: it is not a run's folder (no {CONFIG_FILE}); name one")
    if bundle is not None:
        take_file(bundle)
    findings = []
    for seen in examine_env(arguments.env) if arguments.env else examine():
        finding = _coded(seen)
        findings.append(finding)
        if not arguments.json:
            print(line(finding), flush=True)
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if bundle is not None:
        from polyrhythm.plugins.doctor.bundle import write_bundle

        inside = write_bundle(bundle, [finding._asdict() for finding in findings], about)
        print(f"{bundle}: {', '.join(inside)}; read it before you send it", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"ready": not missing, "checks": list(map(plain, findings))}, indent=2))
    else:
        print(f"missing: {', '.join(missing)}" if missing else f"ready for {arguments.env or 'the quickstart'}")
    return 1 if missing else 0


def plain(finding: Finding) -> dict[str, str]:
    """The fields by name. `said` and `mend` are older names of `detail` and `fix`, kept for scripts."""
    return {**finding._asdict(), "said": finding.detail, "mend": finding.fix}


def _coded(finding: Finding) -> Finding:
    """The finding with a code if something is missing."""
    code = finding.code or _CODES.get(finding.name, "PR204")
    return finding._replace(code=code) if finding.state == "missing" else finding


def line(finding: Finding) -> str:
    """`ok       python            3.11.7, …`, and below it the command to run, if any."""
    fix = f"\n{'':27}run: {finding.fix}" if finding.fix else ""
    code = f"{finding.code}: " if finding.code else ""
    return f"{finding.state:9}{finding.name:18}{code}{finding.detail}{fix}"


def examine() -> Iterator[Finding]:
    """Run all checks and yield each result as soon as it is known. missing: the quickstart cannot run; note: it can."""
    told: dict[str, str] = {}  # message → the first check that raised it
    for check in (*CHECKS, *added("machine", "doctor")):
        try:
            for examined in check.findings(None):
                yield examined.finding if examined.finding.name else examined.finding._replace(name=check.name)
        except (PolyrhythmError, ImportError, OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            first = told.setdefault(str(error), check.name) if isinstance(error, PolyrhythmError) else check.name
            if first != check.name:
                yield Finding(check.name, "missing", f"could not be checked, for the same reason as {first}")
                continue
            fix = install_command(_EXTRA) if isinstance(error, ImportError) else ""
            yield Finding(check.name, "missing", f"{type(error).__name__}: {error}", fix, code_of(error))


def examine_env(name: str) -> Iterator[Finding]:
    """Check an environment: its packages, then the `findings()` of its settings class, if it has that class method.

    `findings` yields `conformance.Finding`s, the slow ones last. ConfigError: there is no such environment.
    """
    from polyrhythm.config.catalog import adapter, declared
    from polyrhythm.config.registry import settings_class

    found = adapter("env", name)
    versions = [f"{need.package} {need.version}".strip() for need in found.needs if need.found]
    missing = [need.package for need in found.needs if not need.found]
    if missing:
        clash = f"; {found.clash}" if found.clash else ""
        yield Finding("packages", "missing", f"missing: {', '.join(missing)}{clash}", found.install)
        return
    yield Finding("packages", "ok", ", ".join(versions) or "none needed")
    own = declared(settings_class("env", name)).findings
    if own is None:
        yield Finding("other checks", "note", f"{name} declares none; polyrhythm check RECIPE tries it")
        return
    for seen in own():
        yield seen._replace(state="missing") if seen.state == "failed" else seen


def _python(_: None = None) -> Finding | str:
    wanted = ".".join(map(str, _PYTHON))
    detail = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info >= _PYTHON:
        return detail
    fix = f"(with your system's package manager) install Python {wanted}, and this package into it"
    return Finding("", "missing", f"{detail}; {wanted} or newer is needed", fix)


def _packages(_: None = None) -> Finding | str:
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
    parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unfit: {', '.join(unfit)}"] * bool(unfit)
    if parts:
        return Finding("", "missing", "; ".join(parts), install_command(_EXTRA))
    return ", ".join(there)


def _satisfies(requirement: str, version: str) -> bool:
    """Whether the version is in the requirement's range; True if `packaging` is not installed."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _torch(_: None = None) -> str:
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    seen = f"CUDA {torch.version.cuda}: {', '.join(devices)}" if devices else "no CUDA device (none is needed)"
    return f"{torch.__version__}, {seen}"


def _cores(_: None = None) -> Finding | str:
    cores = count_cores()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    detail = f"{cores} available, OMP_NUM_THREADS {threads or 'not set'}"
    if threads.isdecimal() and int(threads) > cores:
        detail = f"{detail}: more threads than cores are many times slower"
        return Finding("", "note", detail, "export OMP_NUM_THREADS=1")
    if cores < 2:
        return Finding("", "note", f"{detail}; simulation and training share one core")
    return detail


def _memory(_: None = None) -> Finding | str:
    from polyrhythm.plugins.memory_estimate.room import free_memory

    free = free_memory()
    detail = f"{_gigabytes(free)} free, the quickstart takes about {_gigabytes(MEMORY_BYTES)}"
    if free < MEMORY_BYTES:
        return Finding("", "missing", f"{detail}; end other programs, or use fewer rows (rollout.rows)")
    return detail


def _leftovers(_: None = None) -> str:
    from polyrhythm.runtime.memory.shared_folder import remove_orphans

    removed = remove_orphans()
    return f"removed the shared memory of {len(removed)} dead runs" if removed else "no shared memory of dead runs"


def _shared_memory(_: None = None) -> Finding | str:
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
        return detail
    remount = f"mount -o remount,size={-(-wanted // 10**9) * 2}G {root}"
    return Finding("", "missing", f"{detail}; in a container: --shm-size", f"{as_root()}{remount}")


def _processes(_: None = None) -> Finding | str:
    done = subprocess.run(
        [sys.executable, "-c", "print(6 * 7)"],
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.stdout.strip() == "42":
        return "another process can be started"
    return Finding("", "missing", f"a process that was started ended with {done.returncode}: {last_line(done.stderr)}")


def _messages(_: None = None) -> Finding | str:
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
        return f"ZeroMQ {zmq.zmq_version()} over ipc in {memory.folder.parent}"
    return Finding("", "missing", f"no message came through {inbox.endpoint}; set data_plane.transport=tcp")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


#: The core's checks; the check of rendering, which takes seconds, follows them.
CHECKS = (
    Check("python", "machine", "settings", _python),
    Check("packages", "machine", "settings", _packages),
    Check("torch", "machine", "machine", _torch),
    Check("cores", "machine", "machine", _cores),
    Check("memory", "machine", "machine", _memory),
    Check("leftovers", "machine", "machine", _leftovers),
    Check("shared memory", "machine", "machine", _shared_memory),
    Check("processes", "machine", "machine", _processes),
    Check("messages", "machine", "machine", _messages),
)
