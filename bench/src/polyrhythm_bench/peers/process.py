"""Runs a system's turn in its own process group, and ends the whole group afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from polyrhythm import __file__ as _package
from polyrhythm.errors import RunHalted
from polyrhythm_bench import __file__ as _bench
from polyrhythm_bench.peers import groups

_LOG_TAIL = 3000  # characters of a failed turn's log in the error


def ask(python: Path, module: str, question: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """The answer of `polyrhythm_bench.peers.<module>`, run by `python`.

    It can import Polyrhythm, its benchmarks and the packages of `python`, nothing else. RunHalted: it failed, gave no
    answer or took longer than deadline_s; the end of its log is in the message.
    """
    groups.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="polyrhythm-", ignore_cleanup_errors=True) as folder:
        seen, log = Path(folder) / "seen", Path(folder) / "log"
        seen.mkdir()
        for package in (_package, _bench):
            folder_of = Path(package).parent
            (seen / folder_of.name).symlink_to(folder_of)
        environment = {**os.environ, "PYTHONPATH": str(seen), "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        command = [str(python), "-m", f"polyrhythm_bench.peers.{module}", json.dumps(question)]
        with log.open("wb") as errors:
            popen = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        try:
            answer = _answer(popen, deadline_s)
        finally:
            groups.end(popen.pid)
            popen.wait()
            for pipe in (popen.stdin, popen.stdout):
                assert pipe is not None
                pipe.close()
        if answer is None:
            last = log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
            raise RunHalted(f"{module} gave no answer within {deadline_s:g} s or failed; end of its log:\n{last}")
        return answer


def _answer(popen: subprocess.Popen[bytes], deadline_s: float) -> dict[str, Any] | None:
    """The last line of its output. Its input stays open while this process, its owner, lives."""
    assert popen.stdout is not None
    try:
        popen.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return None
    os.set_blocking(popen.stdout.fileno(), False)  # a child that lives on may hold the other end
    lines = (popen.stdout.read() or b"").splitlines()
    if popen.returncode != 0 or not lines:
        return None
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer if "transitions_per_s" in answer else None
