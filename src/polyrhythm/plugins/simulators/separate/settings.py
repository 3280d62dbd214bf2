"""Settings of an environment in another Python: its section with `python`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict

from polyrhythm.config.base import NotFound
from polyrhythm.config.nearest import nearest
from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import EnvTraits, FullEnvSettings, Variant, traits_of
from polyrhythm.errors import MissingError
from polyrhythm.plugins.simulators.separate import protocol as p
from polyrhythm.plugins.simulators.separate.batch import EnvProcess, SeparateBatch
from polyrhythm.plugins.simulators.setup import envs_folder
from polyrhythm.specs import EnvSpec

#: Specs by Python and section, kept because reading one starts a process that imports the simulator.
_OPENED: dict[str, EnvSpec] = {}


class SeparateSettings(BaseModel):
    """An environment of any type that runs in another Python, with packages of its own.

    `python` is the name of one that `polyrhythm envs setup NAME` has made, or the path of an interpreter. The other
    fields are the environment's own.
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    traits: ClassVar = EnvTraits(own_process=True, variants=True, rendering=True)

    type: str
    """The environment."""
    python: str
    """Name of a Python made by `polyrhythm envs setup`, or path of an interpreter."""

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> SeparateSettings:
        """Settings from a section with `python`. A type that cannot be imported here is validated only in the other
        Python.

        ValueError: invalid settings.
        """
        own = {name: value for name, value in section.items() if name != "python"}
        with suppress(NotFound):  # the other Python may have it
            own = resolve("env", own).model_dump(mode="json")
        return cls(**own, python=str(section["python"]))

    def own(self) -> dict[str, Any]:
        """The environment's section, without `python`."""
        return self.model_dump(mode="json", exclude={"python"})

    def variants(self) -> Mapping[str, Variant]:
        """The environment's variants; none if its settings cannot be imported here."""
        with suppress(NotFound):
            own = resolve("env", self.own())
            return cast(FullEnvSettings, own).variants() if traits_of(own).variants else {}
        return {}

    def rendering(self) -> SeparateSettings | None:
        """Settings for rendering in the same Python: the environment's own by default; None if it does not allow it."""
        process = self._start()
        try:
            found = process.request(p.Rendering(), p.Renders).env
        finally:
            process.close()
        return None if found is None else SeparateSettings(**found, python=self.python)

    def check(self) -> None:
        """ConfigError: the other Python does not start or lacks the environment."""
        self.spec()

    def spec(self) -> EnvSpec:
        """The spec reported by the other Python; requested once."""
        key = json.dumps([self.python, self.own()], sort_keys=True)
        if key not in _OPENED:
            process = self._start()
            _OPENED[key] = process.spec
            process.close()
        return _OPENED[key]

    def build(self, rows: int) -> SeparateBatch:
        """A batch of `rows` rows in a separate process."""
        process = self._start()
        try:
            return SeparateBatch(process, rows)
        except BaseException:
            process.close()
            raise

    def _start(self) -> EnvProcess:
        return EnvProcess(find_python(self.python), self.python, self.own())


def find_python(python: str) -> Path:
    """The interpreter for `env.python`. MissingError: it does not exist."""
    named = os.sep not in python
    path = envs_folder() / python / "bin" / "python" if named else Path(python).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    if os.access(path, os.X_OK) and path.is_file():
        return path
    raise MissingError(f"env.python = {python}: {path} is not a Python interpreter; {_remedy(python, named=named)}")


def _remedy(python: str, *, named: bool) -> str:
    if not named:
        return "name an interpreter, or the folder of an environment"
    extras = metadata.metadata("polyrhythm").get_all("Provides-Extra") or []
    if python in extras:
        return f"run: polyrhythm envs setup {python}"
    made = [path.name for path in envs_folder().glob("*")] if envs_folder().is_dir() else []
    near = nearest(python, sorted({*made, *extras}))
    return f"{near}{'or ' * bool(near)}make it: polyrhythm envs setup {python} --with REQUIREMENT"
