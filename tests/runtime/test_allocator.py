"""Freed memory stays with a process that trains: asking for the same again costs no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from polyrhythm.runtime.allocator import keep_freed_memory

FAULTS = """
import resource, sys
import torch
from polyrhythm.runtime.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def steps():
    for _ in range(50):
        blocks = [torch.zeros(1 << 20) for _ in range(4)]  # 4 MiB each
        del blocks

if sys.argv[1] == "keep":
    assert keep_freed_memory()
steps()
before = faults()
steps()
print(faults() - before)
"""


def faults(word: str, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, word],
        env={"PATH": "", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")
def test_the_same_memory_again_costs_no_faults() -> None:
    assert faults("keep") < 0.1 * faults("leave")


def test_what_the_environment_says_of_the_allocator_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()
