"""Reads back what each tracker has stored on this machine."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: (name, step) → value, in the order in which they were logged.
Points = list[tuple[str, int, float]]


@dataclass(slots=True)
class Stored:
    """What a tracker has. runs: identifiers; the others: of all runs together; None: the tracker keeps none."""

    runs: set[str]
    config: str = ""
    points: Points = field(default_factory=list)
    tables: dict[str, str] = field(default_factory=dict)
    videos: int = 0
    artifacts: int | None = 0
    finished: bool | None = None


def read_tensorboard(folder: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0, "images": 0}).Reload()
    found = Stored({folder.name}, artifacts=None)
    for name in events.Tags()["tensors"]:
        for event in events.Tensors(name):
            tensor = event.tensor_proto
            if tensor.string_val:
                found.tables[name] = tensor.string_val[0].decode()
            else:
                found.points.append((name, event.step, tensor.float_val[0]))
    found.config = found.tables.pop("config")
    found.videos = sum(len(events.Images(name)) for name in events.Tags()["images"])
    return found


def read_lines(file: Path) -> Stored:
    found = Stored(set())
    for call, *arguments in map(json.loads, file.read_text().splitlines()):
        match call, arguments:
            case "open", (own, _, config):
                found.runs.add(own)
                found.config = json.dumps(config)
            case "metrics", (step, values):
                found.points += [(name, step, value) for name, value in values.items()]
            case "table", (name, _, *table):
                found.tables[name] = json.dumps(table, ensure_ascii=False)
            case "video", _:
                found.videos += 1
            case "artifact", _:
                assert found.artifacts is not None
                found.artifacts += 1
            case "close", (finished,):
                found.finished = finished
    return found


def log_records(file: Path) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, which both wandb and swanlab write, after a header of 7 bytes."""
    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def read_wandb(folder: Path) -> Stored:
    from wandb.proto.wandb_internal_pb2 import Record

    found = Stored(set())
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in log_records(file):
            record = Record.FromString(content)
            if record.run.run_id:
                found.runs.add(record.run.run_id)
                found.config += str({one.key: one.value_json for one in record.run.config.update})
            found.artifacts = (found.artifacts or 0) + (record.artifact.type == "report")
            if record.HasField("exit"):
                found.finished = record.exit.exit_code == 0
            _add_history(found, record.history.item, file.parent / "files")
    return found


def _add_history(found: Stored, items: Any, files: Path) -> None:
    """Add one line of wandb's history. A table or video is a mapping whose entries come one by one."""
    values: dict[str, Any] = {}
    for one in items:
        key, *inner = one.nested_key or [one.key]
        if inner:
            values.setdefault(key, {})[inner[0]] = json.loads(one.value_json)
        else:
            values[key] = json.loads(one.value_json)
    step = next((int(values.pop(axis)) for axis in ("version", "update") if axis in values), 0)
    for name, value in values.items():
        if not isinstance(value, dict):
            if not name.startswith("_"):
                found.points.append((name, step, float(value)))
        elif value.get("_type") == "table-file":
            found.tables[name.removesuffix("_table")] = (files / value["path"]).read_text()
        elif value.get("_type") == "video-file":
            found.videos += (files / value["path"]).is_file()


def read_mlflow(uri: str) -> Stored:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("polyrhythm")
    found = Stored(set())
    for run in client.search_runs([experiment.experiment_id]):
        number = run.info.run_id
        found.runs.add(number)
        found.config += str(run.data.params)
        for name in run.data.metrics:
            found.points += [(name, one.step, one.value) for one in client.get_metric_history(number, name)]
        for one in json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]")):
            text = json.dumps(_downloaded(client, number, one["path"]), ensure_ascii=False)
            found.tables[str(Path(one["path"]).parent)] = text
        found.videos = len(
            [one for top in client.list_artifacts(number, "video") for one in _below(client, number, top)]
        )
        found.artifacts = len(client.list_artifacts(number, "report"))
        found.finished = run.info.status == "FINISHED"
    return found


def _downloaded(client: Any, run: str, path: str) -> Any:
    return json.loads(Path(client.download_artifacts(run, path)).read_text())


def _below(client: Any, run: str, top: Any) -> list[str]:
    if not top.is_dir:
        return [top.path]
    return [one for found in client.list_artifacts(run, top.path) for one in _below(client, run, found)]


def read_trackio(folder: Path) -> Stored:
    with sqlite3.connect(folder / "polyrhythm.db") as database:
        found = Stored(set())
        for name, config in database.execute("SELECT run_name, config FROM configs"):
            found.runs.add(name)
            found.config += str(config)
        for name, step, metrics in database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"):
            found.runs.add(name)
            for key, value in json.loads(metrics).items():
                if isinstance(value, dict):
                    kind = value.get("_type", "")
                    found.videos += kind.endswith("video")
                    if kind.endswith("table"):
                        found.tables[key] = json.dumps(value, ensure_ascii=False)
                elif value is not None:
                    found.points.append((key, step, float(value)))
    found.artifacts = len([*folder.glob("artifacts/*/blobs/sha256/*/*")])
    return found


def read_swanlab(folder: Path) -> Stored:
    """Numbers are in a log whose records are not public; their names, and the files beside it, are read."""
    found = Stored(set())
    for run in sorted(folder.glob("swanlog/run-*")):
        found.runs.add(run.name.rpartition("-")[2])
        found.config += (run / "files" / "config.yaml").read_text()
        (log,) = run.glob("*.swanlab")
        content = b"".join(log_records(log)).decode(errors="replace")
        found.points += [(name, -1, 0.0) for name in ("env/return", "evaluation/greedy/low") if name in content]
        for text in sorted(run.glob("media/text/*")):
            found.tables[text.name] = text.read_text()
        found.videos += len([*run.glob("media/image/*.gif")])
        found.artifacts += len([*run.glob("files/run/*.html"), *run.glob("files/*.html")])  # type: ignore[operator]
    return found
