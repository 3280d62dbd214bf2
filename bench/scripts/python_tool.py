"""Milliseconds of a call of the Python tool: one after another, many rows at once, and a new Python for each."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from polyrhythm.plugins.language.sandbox.tool import PythonTool, SandboxSettings

CODE = "print(sum(range(100)))"
CALLS, ROUNDS = 200, 3


def median_ms(run: Callable[[], None], calls: int) -> float:
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        found.append(1000 * (time.perf_counter() - began) / calls)
    return sorted(found)[ROUNDS // 2]


def report(name: str, tool: PythonTool) -> None:
    outcomes = [tool.run(CODE) for _ in range(20)]
    assert all(outcome.output == "4950\n" for outcome in outcomes)

    def one_by_one() -> None:
        for _ in range(CALLS):
            tool.run(CODE)

    def at_once() -> None:
        for call in [tool.start(CODE) for _ in range(CALLS)]:
            tool.finish(call)

    cpu = 1000 * sum(tool.run(CODE).cpu_s for _ in range(100)) / 100
    print(f"| {name} | {median_ms(one_by_one, CALLS):.1f} | {median_ms(at_once, CALLS):.1f} | {cpu:.1f} |", flush=True)
    tool.close()


def main() -> None:
    print("| | one after another | all started at once | CPU time of the call |\n|---|---|---|---|")
    report("the standard library", PythonTool(SandboxSettings()))
    report("without namespaces", PythonTool(SandboxSettings(), ("namespaces",)))
    report("numpy", PythonTool(SandboxSettings(modules=("numpy",), memory_mib=1024)))

    def new_python() -> None:
        for _ in range(20):
            subprocess.run([sys.executable, "-I", "-c", CODE], check=True, capture_output=True)  # noqa: S603

    print(f"| a new Python for each, without a sandbox | {median_ms(new_python, 20):.1f} | | |")


if __name__ == "__main__":
    main()
