"""A run of real stations in a temporary folder, for the time of a measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.validation.check import validate_run


@contextmanager
def running(config: RunConfig, *, validated: bool = True) -> Iterator[Pipeline]:
    """The configuration's pipeline, started, in a temporary folder.

    validated: call `validate_run` first; False for a policy that it would refuse, such as one that never samples.
    Errors are those of `validate_run` and `build_pipeline`.
    """
    policy = validate_run(config).policy if validated else None
    with (
        tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder,
        closing(build_pipeline(config, policy, Path(folder))) as pipeline,
    ):
        yield pipeline
