"""Hosts on this machine: apart by setting, or in a network namespace behind a link."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from polyrhythm.plugins.cluster.hosts.agent import LocalNode

#: The link between this machine and the namespace, by process id so that test sessions do not meet.
_NET = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
HERE, THERE = f"{_NET}.1", f"{_NET}.2"


def memory(folder: Path, name: str) -> dict[str, str]:
    """The setting that gives a host a memory of its own."""
    own = folder / f"memory-{name}"
    own.mkdir(parents=True)
    return {"POLYRHYTHM_SHARED_MEMORY": str(own)}


def apart_by_setting(folder: Path, count: int) -> list[LocalNode]:
    return [LocalNode(f"node-{i}", environment=memory(folder, str(i))) for i in range(count)]


@contextmanager
def behind_a_link(folder: Path, *quality: str) -> Iterator[list[LocalNode]]:
    """A node here and one in a namespace of its own, with memories of their own. quality: of the link, for `tc qdisc`.
    Skips the test, with the reason, where this machine forbids it."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("iproute2 is not installed")
    space, ours, theirs = f"poly{os.getpid()}", f"pa{os.getpid()}", f"pb{os.getpid()}"
    with ExitStack() as undo:
        _ip("netns", "add", space)
        undo.callback(_run, ["ip", "netns", "del", space])
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
        _ip("addr", "add", f"{HERE}/24", "dev", ours)
        _ip("link", "set", ours, "up")
        for words in (("addr", "add", f"{THERE}/24", "dev", theirs), ("link", "set", theirs, "up")):
            _ip("-n", space, *words)
        _ip("-n", space, "link", "set", "lo", "up")
        if quality:
            _tried(["tc", "qdisc", "add", "dev", ours, "root", *quality])
        prefix = ("ip", "netns", "exec", space)
        yield [
            LocalNode("here", HERE, environment=memory(folder, "here")),
            LocalNode("there", THERE, prefix, memory(folder, "there")),
        ]


def _ip(*words: str) -> None:
    _tried(["ip", *words])


def _tried(words: Sequence[str]) -> None:
    if wrong := _run(words):
        pytest.skip(f"{' '.join(words)}: {wrong}")


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stderr or f"status {done.returncode}").strip() if done.returncode else ""
