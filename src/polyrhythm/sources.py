"""Folders by name: a setting that names a folder may have the form `scheme://...`, such as `hf://owner/name@revision`.

A plugin adds a scheme under the kind "source". The resolved configuration names a fixed revision, so that a resumed or
repeated run reads the same files; a name that is not in the scheme's local cache is downloaded by `fetch` alone, which
commands call before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
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
#: Revisions that a block of `pinning_once` has read, by the written name; None outside of one.
_READ: ContextVar[dict[tuple[str, Contents], str] | None] = ContextVar("read revisions", default=None)


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


@contextmanager
def pinning_once() -> Iterator[None]:
    """In this block each name's revision is read once, so that all configurations that it loads name the same."""
    before = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(before)


def names(config: BaseModel) -> dict[str, str]:
    """The names that a configuration has, by setting."""
    return {path: name for path, (name, _) in _names(config).items()}


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
    found = {key: section[key] for key in keys if is_name(section.get(key))}
    return {**section, **{key: _pin(name, contents, f"{path}.{key}") for key, name in found.items()}}


def _pin(name: str, contents: Contents, what: str) -> str:
    read = _READ.get()
    if read is None:
        return source(name, what).pin(name, contents, what)
    if (name, contents) not in read:
        read[name, contents] = source(name, what).pin(name, contents, what)
    return read[name, contents]


def fetch(config: BaseModel) -> None:
    """Download what a run's configuration names and the cache lacks. ConfigError, MissingError: that fails, or a name's
    revision is not fixed though it could be by now."""
    for what, (name, contents) in _names(config).items():
        fetched_folder(name, contents, what)
        if (fixed := _pin(name, contents, what)) != name:
            raise ConfigError(
                f"{what} = {name}: its revision was not known when the settings were read, and is now; start again, or "
                f"set {what}={fixed}"
            )


def _names(config: BaseModel) -> dict[str, tuple[str, Contents]]:
    policy: Any = getattr(config, "policy", None)
    found: dict[str, tuple[str, Contents]] = {f"policy.{key}": (getattr(policy, key, ""), "model") for key in _POLICY}
    if (dataset := getattr(getattr(config, "demonstrations", None), "dataset", None)) is not None:
        found["demonstrations.dataset.folder"] = (dataset.folder, "dataset")
    return {path: one for path, one in found.items() if is_name(one[0])}
