"""A run of real stations for the time of a measurement; nothing of it is kept."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.validation.check import validate_run


@contextmanager
def running(config: RunConfig) -> Iterator[Pipeline]:
    """The configuration's pipeline, started, in a folder that goes with it. Errors are those of `validate_run` and
    `build_pipeline`."""
    checked = validate_run(config)
    with (
        tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder,
        closing(build_pipeline(checked.config, folder=Path(folder))) as pipeline,
    ):
        yield pipeline
