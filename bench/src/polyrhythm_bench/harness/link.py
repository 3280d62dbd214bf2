"""Two ends of a link on this machine: network namespaces with a pair of virtual Ethernet devices, shaped by tc.

Where the machine forbids that, both ends are the loopback interface, with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """here, there: addresses of the two ends; prefix: words before a command that shall run there; name: for people."""

    here: str
    there: str
    prefix: tuple[str, ...]
    name: str


class _ForbiddenError(Exception):
    """The machine does not allow it; the message says what."""


@contextmanager
def open_link(rate: str = "") -> Iterator[Link]:
    """A link whose both ends send at most `rate` (of tc, such as 1gbit; "": as fast as they can)."""
    with ExitStack() as undo:
        try:
            link = _namespace(rate, undo)
        except _ForbiddenError as error:
            undo.close()
            link = Link("127.0.0.1", "127.0.0.1", (), f"loopback ({error})")
        yield link


def _namespace(rate: str, undo: ExitStack) -> Link:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise _ForbiddenError("iproute2 is not installed")
    own = os.getpid()
    net, space, ours, theirs = f"10.{50 + own % 50}.{own // 50 % 250}", f"pb{own}", f"ba{own}", f"bb{own}"
    _run("ip", "netns", "add", space)
    undo.callback(subprocess.run, ["ip", "netns", "del", space], check=False)
    _run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
    _run("ip", "addr", "add", f"{net}.1/24", "dev", ours)
    _run("ip", "link", "set", ours, "up")
    inside = ("ip", "-n", space)
    _run(*inside, "addr", "add", f"{net}.2/24", "dev", theirs)
    for device in (theirs, "lo"):
        _run(*inside, "link", "set", device, "up")
    prefix = ("ip", "netns", "exec", space)
    if rate:
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _run("tc", "qdisc", "add", "dev", ours, *shape)
        _run(*prefix, "tc", "qdisc", "add", "dev", theirs, *shape)
    return Link(f"{net}.1", f"{net}.2", prefix, f"veth, {rate}" if rate else "veth, not shaped")


def _run(*words: str) -> None:
    done = _done(words)
    if done.returncode:
        raise _ForbiddenError(f"{' '.join(words)}: {done.stderr.strip() or f'status {done.returncode}'}")


def _done(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
