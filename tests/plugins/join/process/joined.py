"""Runs with places for simulators that join, and simulators that do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.process.runs import ASYNCHRONOUS, PATIENCE_S, children, config, orphaned_folders
from tests.runtime.links import free_port

from polyrhythm import __version__
from polyrhythm.config.load import load_env, merge
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.plugins.join.joining import JoinClient
from polyrhythm.plugins.join.messages import read_token
from polyrhythm.scheduler import records

#: A run in this process that nobody but one simulator that joins steps for.
ALONE: dict[str, Any] = merge(
    ASYNCHRONOUS,
    {"launcher": "inline", "rollout": {"simulators": 0, "env_batches": 1}, "join": {"simulators": 1}},
)


class Joining:
    """A simulator that joins the run of `folder`, in a thread; ended: why it has ended."""

    def __init__(self, folder: Path, port: int, env: Any = None, version: str = __version__, **settings: Any) -> None:
        self.ended: str | BaseException | None = None
        token = settings.pop("token", folder / "join.token")
        env = env if env is not None else load_env("gymnasium:CartPole-v1", ["max_steps=40"])
        self.client = JoinClient(
            f"tcp://127.0.0.1:{port}", read_token(token), env, version, **{"patience_s": 30.0, **settings}
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.ended = self.client.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.ended = error

    def wait(self) -> str | BaseException | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it still takes part"
        return self.ended


@contextmanager
def opened(folder: Path, base: dict[str, Any] = ALONE, **changes: Any) -> Iterator[tuple[Pipeline, int]]:
    """A run that has not started, and the port of its first place."""
    port = free_port()
    pipeline = build_pipeline(
        RunContext(config(base, **merge(changes, {"join": {"port": port}})), folder=folder), start=False, record=True
    )
    try:
        yield pipeline, port
    finally:
        pipeline.close()
        assert not children()
        assert not orphaned_folders()
        assert not (folder / "join.token").exists()


@contextmanager
def joined(folder: Path, base: dict[str, Any] = ALONE, **changes: Any) -> Iterator[tuple[Pipeline, Joining]]:
    """A run that has started, and the simulator that has joined it."""
    with ExitStack() as stack:
        pipeline, port = stack.enter_context(opened(folder, base, **changes))
        joining = Joining(folder, port)
        pipeline.loop.start()
        yield pipeline, joining
    assert joining.wait() == "the run is over"


def lost(pipeline: Pipeline) -> list[records.StationLost]:
    """The stations that the conductor was told to be lost."""
    return [decision.event for decision in pipeline.loop.trace if isinstance(decision.event, records.StationLost)]


def attempts(pipeline: Pipeline) -> list[int]:
    """The attempt of each sample that finished."""
    events = [decision.event for decision in pipeline.loop.trace]
    return [event.attempt for event in events if isinstance(event, records.SampleFinished)]
