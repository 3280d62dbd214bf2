"""A system's turn in a process group of its own, which is gone afterwards, whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from polyrhythm import __file__ as _package
from polyrhythm.benchmarks.peers import groups
from polyrhythm.errors import RunHalted

_SAID = 3000  # characters of a failed turn's log that are shown


def ask(python: Path, module: str, question: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """The answer of `polyrhythm.benchmarks.peers.<module>`, run by `python`.

    It sees this package, and beside it nothing that `python` does not have. RunHalted: it failed, gave no answer or
    took longer than deadline_s; the end of what it said is in the message.
    """
    groups.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="polyrhythm-", ignore_cleanup_errors=True) as folder:
        seen, log = Path(folder) / "seen", Path(folder) / "log"
        seen.mkdir()
        (seen / "polyrhythm").symlink_to(Path(_package).parent)
        environment = {**os.environ, "PYTHONPATH": str(seen), "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        command = [str(python), "-m", f"polyrhythm.benchmarks.peers.{module}", json.dumps(question)]
        with log.open("wb") as said:
            popen = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
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
            last = log.read_text(encoding="utf-8", errors="replace")[-_SAID:]
            raise RunHalted(f"{module} gave no answer within {deadline_s:g} s or failed; its last words:\n{last}")
        return answer


def _answer(popen: subprocess.Popen[bytes], deadline_s: float) -> dict[str, Any] | None:
    """The last line of its output. Its input stays open, as a sign that its owner lives."""
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
