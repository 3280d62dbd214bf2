"""Folders by name: a setting that names a folder may have the form `scheme://...`, such as `hf://owner/name@revision`.

A plugin adds a scheme under the kind "source". The resolved configuration names a fixed revision, so that a resumed or
repeated run reads the same files; a name that is not in the scheme's local cache is downloaded by `fetch` alone, which
commands call before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from polyrhythm.errors import ConfigError
from polyrhythm.plugin import load, table

if TYPE_CHECKING:
    from pydantic import BaseModel

Contents = Literal["model", "dataset"]
#: Settings that name folders of released files, by section.
_POLICY = ("checkpoint", "tokenizer")
_SEPARATOR = "://"


class FolderSource(Protocol):
    """A scheme: a module with these functions. `name` is the whole text. what: the setting, for messages."""

    def pin(self, name: str, contents: Contents, what: str) -> str:
        """The name with the revision that it has now. Without a connection and cache it is returned as it is.
        ConfigError: it does not exist, or may not be read."""

    def folder(self, name: str, contents: Contents, what: str) -> Path:
        """The folder in the local cache. MissingError: it is not complete there; the message has the command."""

    def fetch(self, name: str, contents: Contents, what: str) -> Path:
        """The same, after downloading files that are missing."""

    def check_push(self, name: str, contents: Contents) -> object:
        """ConfigError: this account cannot upload to this name."""

    def push(self, folder: Path, name: str, contents: Contents, *, public: bool, run: Path | None = None) -> str:
        """Upload the folder's files as a new revision, with a card, and return its name with the revision. run: from
        which a model was exported."""


def is_name(text: object) -> bool:
    """Whether the text is a name of the form `scheme://...`."""
    return isinstance(text, str) and _SEPARATOR in text


def source(name: str, what: str) -> FolderSource:
    """The scheme of a name. ConfigError: no plugin adds it."""
    scheme = name.partition(_SEPARATOR)[0]
    if not is_name(name) or scheme not in table("source"):
        known = ", ".join(f"{one}{_SEPARATOR}" for one in table("source"))
        raise ConfigError(f"{what} = {name}: it is not a name that begins with {known or 'a known scheme'}; write one")
    found: FolderSource = load("source", scheme)
    return found


def local_folder(text: str | Path, contents: Contents = "model", what: str = "checkpoint") -> Path:
    """The folder that a setting names, of this machine or in the cache. A folder of this machine may be missing.
    MissingError: a name is not in the cache."""
    if isinstance(text, str) and is_name(text):
        return source(text, what).folder(text, contents, what)
    return Path(text).expanduser()


def fetched_folder(text: str | Path, contents: Contents = "model", what: str = "checkpoint") -> Path:
    """Like `local_folder`; a name's files are downloaded first if they are missing."""
    if isinstance(text, str) and is_name(text):
        return source(text, what).fetch(text, contents, what)
    return Path(text).expanduser()


def pinned(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's data with the current revision in each name of a source."""
    found = dict(tree)
    policy, demonstrations = found.get("policy"), found.get("demonstrations")
    if isinstance(policy, Mapping):
        found["policy"] = _pinned(policy, _POLICY, "model", "policy")
    if isinstance(demonstrations, Mapping) and isinstance(dataset := demonstrations.get("dataset"), Mapping):
        changed = _pinned(dataset, ("folder",), "dataset", "demonstrations.dataset")
        found["demonstrations"] = {**demonstrations, "dataset": changed}
    return found


def _pinned(section: Mapping[str, Any], keys: tuple[str, ...], contents: Contents, path: str) -> dict[str, Any]:
    names = {key: section[key] for key in keys if is_name(section.get(key))}
    told = {key: f"{path}.{key}" for key in names}
    return {**section, **{key: source(name, told[key]).pin(name, contents, told[key]) for key, name in names.items()}}


def fetch(config: BaseModel) -> None:
    """Download what a run's configuration names and the cache lacks. ConfigError, MissingError: that fails, or a name's
    revision is not fixed though it could be by now."""
    policy: Any = getattr(config, "policy", None)
    for key in _POLICY:
        _fetch_fixed(getattr(policy, key, ""), "model", f"policy.{key}")
    dataset = getattr(getattr(config, "demonstrations", None), "dataset", None)
    if dataset is not None:
        _fetch_fixed(dataset.folder, "dataset", "demonstrations.dataset.folder")


def _fetch_fixed(name: str, contents: Contents, what: str) -> None:
    if not is_name(name):
        return
    fetched_folder(name, contents, what)
    if (fixed := source(name, what).pin(name, contents, what)) != name:
        raise ConfigError(
            f"{what} = {name}: its revision was not known when the settings were read, and is now; start again, or "
            f"set {what}={fixed}"
        )
