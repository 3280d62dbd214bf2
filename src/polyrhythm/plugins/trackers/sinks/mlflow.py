"""MLflow, https://mlflow.org."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import field_validator

from polyrhythm.plugins.trackers.sink import Sink, Table, TrackedRun, TrackerSettings
from polyrhythm.readable import by_path

#: Characters that MLflow refuses in names.
_OTHER = re.compile(r"[^\w./: -]")
#: Tag by which a repeated opening finds the run that it began.
_KEY = "polyrhythm.key"
#: Most parameters of a request, and characters of one.
_MOST, _LONGEST = 100, 500


class MlflowSettings(TrackerSettings):
    """MLflow's tracking server, or a store on this machine."""

    needs: ClassVar[tuple[str, ...]] = ("mlflow",)
    extra: ClassVar[str] = "mlflow"

    type: str = "mlflow"
    uri: str = ""
    """A server (https://...) or a store (sqlite:///FILE); empty: MLFLOW_TRACKING_URI, else MLflow's local store."""
    experiment: str = "polyrhythm"
    """Experiment of the run."""
    tags: Mapping[str, str] = {}
    """Tags of the run."""

    @field_validator("uri")
    @classmethod
    def _has_no_password(cls, uri: str) -> str:
        if "@" in urlsplit(uri).netloc:
            raise ValueError(
                "it has a user or password, which would be in the run's files; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or the whole address as MLFLOW_TRACKING_URI, and leave it out here"
            )
        return uri

    def open(self, run: TrackedRun) -> Sink:
        return MlflowSink(self, run)


class MlflowSink(Sink):
    """A run of MLflow. Tables are artifacts in the form that its pages show as tables."""

    def __init__(self, settings: MlflowSettings, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # calls are repeated by `delivery`
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        self._client: Any = MlflowClient(settings.uri or None)
        self._tables: list[dict[str, str]] = []
        begun = self._client.get_run(run.id) if run.id else self._begun(settings, run)
        self.id = begun.info.run_id
        self._tables = json.loads(begun.data.tags.get("mlflow.loggedArtifacts", "[]"))
        self._client.update_run(self.id, status="RUNNING")
        if not run.id:
            flat = [(_plain(name), str(value)[:_LONGEST]) for name, value in by_path(run.config)]
            new = [Param(*one) for one in flat if one[0] not in begun.data.params]  # they cannot be changed
            for first in range(0, len(new), _MOST):
                self._client.log_batch(self.id, params=new[first : first + _MOST])
        self._client.log_dict(self.id, dict(run.config), "config.json")

    def _begun(self, settings: MlflowSettings, run: TrackedRun) -> Any:
        """A new run, or the one that an opening with the same key began before it failed."""
        experiment = self._client.get_experiment_by_name(settings.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment)
        if run.key and (found := self._client.search_runs([number], f"tags.`{_KEY}` = '{run.key}'")):
            return found[0]
        tags = {**settings.tags, **({_KEY: run.key} if run.key else {})}
        return self._client.create_run(number, run_name=run.name, tags=tags)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        found = [self._metric(_plain(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=found)

    def log_table(self, name: str, step: int, table: Table) -> None:
        path = f"{_plain(name)}/version-{step}.json"
        self._client.log_dict(
            self.id, {"columns": list(table.columns), "data": [list(row) for row in table.rows]}, path
        )
        if not any(one["path"] == path for one in self._tables):
            self._tables.append({"path": path, "type": "table"})
            self._client.set_tag(self.id, "mlflow.loggedArtifacts", json.dumps(self._tables))

    def log_video(self, name: str, step: int, file: Path) -> None:
        self._client.log_artifact(self.id, str(file), f"{_plain(name)}/version-{step}")

    def log_artifact(self, name: str, file: Path) -> None:
        self._client.log_artifact(self.id, str(file), _plain(name))

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


def _plain(name: str) -> str:
    return _OTHER.sub("_", name)
