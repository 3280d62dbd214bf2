"""Counts the files in which code runs for each observation: python tools/observation_files.py [setting=value ...]

Trains cartpole in processes and counts calls by file in the simulator, the main process and the generator. A file
counts if a function of it is called once for two requests or more. Left out: environment, policy, observers, settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SITE = """
import collections, json, os, sys, threading, time
calls = collections.Counter()
def profile(frame, event, argument):
    path = frame.f_code.co_filename
    at = path.find("/src/polyrhythm/")
    if event == "call" and at >= 0:
        calls[path[at + 16:] + ":" + frame.f_code.co_name] += 1
def write():
    while True:
        time.sleep(0.5)
        with open(os.path.join(os.environ["OBSERVATION_FILES"], str(os.getpid())), "w") as file:
            json.dump(dict(calls), file)
def begin():
    calls.clear()
    threading.setprofile(None)
    threading.Thread(target=write, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)
os.register_at_fork(after_in_child=begin)
begin()
"""
#: What runs once for each observation in each process.
ROLES = {
    "simulator": "stations/simulator/slot.py:record",
    "main": "scheduler/conductor.py:handle",
    "generator": "stations/generator.py:work",
}
LEFT_OUT = (
    *("config/", "envs/", "observe/", "pipeline/callbacks", "pipeline/observers", "pipeline/signals"),
    *("pipeline/train.py", "plugins/", "policies/", "runtime/spans.py", "scheduler/codec.py", "scheduler/settings.py"),
    *("scheduler/versions.py", "stations/simulator/waits.py"),
)


def main(settings: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site, out = Path(folder, "site"), Path(folder, "out")
        site.mkdir()
        out.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        source = Path(__file__).parents[1] / "src"
        environ = os.environ | {"PYTHONPATH": f"{site}:{source}", "OBSERVATION_FILES": str(out)}
        words = ["train", "cartpole", "training.versions=8", "--out", f"{folder}/run", *settings]
        command = [sys.executable, "-m", "polyrhythm", *words]
        subprocess.run(command, env=environ, check=True, capture_output=True)  # noqa: S603 - this package
        processes = [Counter(json.loads(path.read_text() or "{}")) for path in out.iterdir()]
    by_role = {role: max(processes, key=lambda calls, mark=mark: calls[mark]) for role, mark in ROLES.items()}
    requests = by_role["simulator"][ROLES["simulator"]]
    found: dict[str, list[str]] = {}
    for role, calls in by_role.items():
        for file in {name.partition(":")[0] for name, count in calls.items() if count >= requests / 2}:
            if not file.startswith(LEFT_OUT):
                found.setdefault(file, []).append(role)
    for file in sorted(found):
        print(f"{file:40} {', '.join(found[file])}")
    print(f"{len(found)} files, {requests} requests")


if __name__ == "__main__":
    main(sys.argv[1:])
