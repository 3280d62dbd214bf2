"""Freed memory stays with a process that trains: asking for the same again costs no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from tests.long import long

from polyrhythm.imports import keep_freed_memory

PROGRAM = """
import resource, sys, threading
from polyrhythm.imports import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def steps():
    import torch
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model, x = torch.nn.Sequential(*layers), torch.ones(8192, 64)
    for _ in range(5):
        model(x).square().mean().backward()

def measure():
    for _ in range(5):  # autograd's thread frees at other times in each step: the heap reaches its peak by chance
        steps()
    before = faults()
    for _ in range(8):
        steps()
    print(faults() - before)

if sys.argv[2] == "thread":
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
else:
    measure()
"""


def faults(word: str, where: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, word, where],
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")
@pytest.mark.parametrize("where", [pytest.param("main", marks=long(5, "the main thread")), "thread"])
def test_training_steps_reuse_the_memory_of_those_before(where: str) -> None:
    kept = faults("keep", where)
    # By chance an allocator that is left alone keeps its memory too; one that does not has thousands of faults.
    assert kept < 100 or kept < 0.75 * faults("leave", "main")


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=1")]
)
def test_what_the_environment_says_of_the_allocator_stands(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()
