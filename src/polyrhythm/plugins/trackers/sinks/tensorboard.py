"""TensorBoard: an event file in `<run>/tensorboard`, for `tensorboard --logdir runs`.

Numbers are scalars, the configuration and tables are texts, videos are animated images. It keeps no files.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from polyrhythm.observe.log_file import LogFile
from polyrhythm.plugins.trackers.sink import Sink, Table, TrackedRun, TrackerSettings
from polyrhythm.plugins.trackers.videos import as_gif
from polyrhythm.readable import markdown_table


class TensorBoardSettings(TrackerSettings):
    """TensorBoard's event files, in the run's folder."""

    needs: ClassVar[tuple[str, ...]] = ("tensorboard",)
    in_run: ClassVar[bool] = True

    type: str = "tensorboard"

    def open(self, run: TrackedRun) -> Sink:
        return TensorBoardSink(run)


class TensorBoardSink(Sink):
    """An event file of this part of the run.

    TensorBoard's own writer has a thread whose traceback would reach the terminal when the disk is full. flush_s:
    seconds between two writes of the buffer.
    """

    _number = itertools.count()

    def __init__(self, run: TrackedRun, flush_s: float = 10.0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._flush_s = flush_s
        folder, began, number = run.folder / "tensorboard", time.time(), next(self._number)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(began):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._lines, self._flushed = LogFile(folder / name, buffered=True), time.monotonic()
        self._records, self._event, self._scalar = RecordWriter(self._lines), Event, scalar_pb
        self._records.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
        settings = json.dumps(run.config, indent=2, ensure_ascii=False)
        self._write_text("config", 0, "\n".join(f"    {line}" for line in settings.splitlines()))
        self._lines.flush()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._write(step, self._scalar(name, value))
        if time.monotonic() - self._flushed >= self._flush_s:
            self._flush()

    def log_table(self, name: str, step: int, table: Table) -> None:
        self._write_text(name, step, markdown_table(*table))

    def log_video(self, name: str, step: int, file: Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        data, width, height = as_gif(file)
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
        self._write(step, Summary(value=[Summary.Value(tag=name, image=image)]))
        self._flush()

    def close(self, finished: bool) -> None:  # noqa: ARG002
        self._lines.close()

    def _write_text(self, name: str, step: int, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write(step, text_pb(name, text))

    def _write(self, step: int, summary: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), step=step, summary=summary).SerializeToString())

    def _flush(self) -> None:
        self._lines.flush()
        self._flushed = time.monotonic()
