"""A run of real stations in a temporary folder, for the time of a measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.cluster.hosts.agent import Node
from polyrhythm.plugins.cluster.launching import launch_on


@contextmanager
def running(config: RunConfig, *, validated: bool = True, nodes: Sequence[Node] = ()) -> Iterator[Pipeline]:
    """The configuration's pipeline, started, in a temporary folder.

    validated: call `validate_run` first; False for a policy that it would refuse, such as one that never samples.
    nodes: places for the stations, in turn; none: as `launcher` says.
    Errors are those of `validate_run` and `build_pipeline`.
    """
    if validated:
        validate_run(config)
    with (
        tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder,
        closing(
            build_pipeline(RunContext(config, folder=Path(folder), launch=launch_on(nodes) if nodes else None))
        ) as pipeline,
    ):
        yield pipeline
