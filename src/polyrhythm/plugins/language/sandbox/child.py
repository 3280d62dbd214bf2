"""The process that the server forks for one call: it confines itself, runs the code and exits."""

from __future__ import annotations

import ast
import json
import linecache
import os
import random
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from polyrhythm.plugins.language.sandbox import kernel
from polyrhythm.plugins.language.sandbox.seccomp import restrict_calls

#: Name of the code in tracebacks.
_NAME = "<python>"
#: The call's socket, until the code runs.
_SOCKET = 3
#: Files and folders in a working folder.
_MOST_FILES = 512
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Confinement:
    """Confinement shared by all calls. work: the working folder, empty without namespaces; seccomp: the filter,
    empty without it; landlock: its version, 0 without it; readable: its rules for readable paths."""

    cpu_s: int
    memory_mib: int
    files_mib: int
    open_files: int
    output_bytes: int
    readable: tuple[tuple[str, int], ...]
    work: str = ""
    seccomp: bytes = b""
    landlock: int = 0


def run_child(confinement: Confinement, parent: int, code: int, output: int, call: int) -> NoReturn:
    """Run the code in the file `code` with its output in the file `output`, then exit. parent: the server's process."""
    try:
        text = os.pread(code, os.fstat(code).st_size, 0).decode()
        _confine(confinement, parent, output, call)
    except BaseException as error:  # noqa: BLE001 - told to the client
        os.write(call, json.dumps({"lost": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os.close(_SOCKET)
    status = 1
    try:
        status = _run(text)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _confine(confinement: Confinement, parent: int, output: int, call: int) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError("the server is gone")
    writable = _enter_folder(confinement)
    for target, source in ((1, output), (2, output), (_SOCKET, call)):
        os.dup2(source, target)
    os.closerange(_SOCKET + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if confinement.landlock:
        kernel.restrict_files(confinement.landlock, confinement.readable, writable)
    kernel.drop_capabilities()
    _limit(confinement)
    if confinement.seccomp:
        restrict_calls(confinement.seccomp)


def _enter_folder(confinement: Confinement) -> list[str]:
    """Change to the working folder; return it if it is writable. Without namespaces it is a deleted folder, in which
    nothing can be created."""
    if not confinement.work:
        return []
    writable = confinement.files_mib > 0
    if writable:
        kernel.mount_folder(confinement.work, confinement.files_mib, _MOST_FILES)
    os.chdir(confinement.work)
    return [confinement.work] if writable else []


def _limit(confinement: Confinement) -> None:
    """Set the kernel's limits, soft and hard alike, so that reaching a time limit ends the process. The server
    enforces the exact limit of CPU time; the kernel's, which is sampled, applies when the server cannot."""
    file_bytes = max(confinement.files_mib * _MIB, confinement.output_bytes + 1)
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, 2 * confinement.cpu_s + 1),
        (resource.RLIMIT_AS, confinement.memory_mib * _MIB),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, confinement.open_files),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 16),
    ):
        hard = resource.getrlimit(limit)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (bound, bound))


def _run(text: str) -> int:
    """Run code like a notebook cell: print the value of a final expression. Returns the exit status."""
    random.seed(0)
    linecache.cache[_NAME] = (len(text), None, text.splitlines(keepends=True), _NAME)
    names = {"__name__": "__main__"}
    try:
        tree = ast.parse(text, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _NAME, "exec"), names)  # noqa: S102 - that is what it is for
        if isinstance(last, ast.Expr):
            exec(compile(ast.Interactive([last]), _NAME, "single"), names)  # noqa: S102
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # noqa: T201 - the code's own output
        return 0 if end.code in (None, 0) else 1
    except BaseException as error:  # noqa: BLE001 - the code's own
        traceback.print_exception(type(error), error, _of_the_code(error.__traceback__))
        return 1
    return 0


def _of_the_code(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename != _NAME:
        trace = trace.tb_next
    return trace
