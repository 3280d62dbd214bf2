"""Results of a benchmark that are written when they are there, so that it can be interrupted and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyrhythm.errors import ConfigError
from polyrhythm.files import atomic_write


def content_of(path: Path) -> dict[str, Any]:
    """Of a result's file: scene, date, result."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True, slots=True)
class KeptResults:
    """folder: of the files NAME.json; None keeps nothing. scene: what the results belong to, such as the device.
    replaces: a result of another scene is measured again instead of refused."""

    folder: Path | None
    scene: Mapping[str, Any]
    replaces: bool = False

    def read(self, name: str) -> dict[str, Any] | None:
        """The result; None if it is not there, does not say its scene (of an older version), or is to be replaced.
        ConfigError: it is of another scene."""
        if self.folder is None or not (path := self.folder / f"{name}.json").is_file():
            return None
        content = content_of(path)
        if "scene" not in content:
            return None
        if content["scene"] != self.scene:
            if self.replaces:
                return None
            raise ConfigError(
                f"--out {self.folder}: {path.name} is of {content['scene']}, this is {dict(self.scene)}; "
                "name another folder"
            )
        result: dict[str, Any] = content["result"]
        return result

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / f"{name}.json") as unfinished:
            content = {"scene": self.scene, "date": datetime.now(UTC).date().isoformat(), "result": result}
            unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def get(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result that is there, else the measured one, which is kept."""
        found = self.read(name)
        if found is None:
            found = measure()
            self.write(name, found)
        return found
