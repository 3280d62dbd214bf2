"""What uploaded files tell of this machine: folders are named by their last part, addresses have no user and password,
and settings of where a run runs and is recorded are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Sections of a run's configuration that name hosts, services and folders of this machine, and no part of the policy.
_LEFT_OUT = ("tracking", "join", "ray", "prometheus", "out_dir", "resume", "init_from")
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<user>[^/\s]*@)?(?P<rest>.*)", re.DOTALL)
#: A path within a text: after a space, a quote, a bracket, or one of = , ; :
_WITHIN = re.compile(r"(?:(?<=[\s=,;'\"(\[])|(?<=:)(?!//))(?:~[\w-]*|\.\.)?/[^\s,;:'\")\]]+")
#: A snapshot in the hub's cache.
_SNAPSHOT = re.compile(r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")
_BASE = "base_model_name_or_path"


def without_paths(value: Any) -> Any:
    """Plain data, keys included, in which folders of this machine are named by their last part alone."""
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    if found := _ADDRESS.fullmatch(text):
        rest = found["rest"]
        local = not found["user"] and (rest.startswith(("/", "~")) or ".." in Path(rest).parts)
        return f"{found['scheme']}://{f'/{Path(rest).name}' if local else rest}"
    if text.startswith(("/", "~")) or ".." in Path(text).parts:
        return Path(text).name
    return _WITHIN.sub(lambda path: Path(path[0]).name, text)


def clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration as it is uploaded."""
    found: dict[str, Any] = without_paths({key: item for key, item in config.items() if key not in _LEFT_OUT})
    return found


def _clean_policy(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = without_paths({key: item for key, item in content.items() if key != "config"})
    config = content.get("config")
    return {**found, "config": clean_config(config)} if isinstance(config, Mapping) else found


def _clean_adapters(content: Mapping[str, Any]) -> dict[str, Any]:
    """adapter_config.json, whose base is named as on the hub if it is a snapshot of its cache."""
    base = _SNAPSHOT.fullmatch(str(content.get(_BASE) or ""))
    found: dict[str, Any] = without_paths(content)
    return {**found, _BASE: f"{base['owner']}/{base['name']}", "revision": base["commit"]} if base else found


#: Files that may name folders of this machine. Tokenizers hold words such as `/a`, which are none.
_FILES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "policy.json": _clean_policy,
    "adapter_config.json": _clean_adapters,
    "config.json": without_paths,
    "meta/polyrhythm.json": without_paths,
}


def cleaned_file(file: Path, name: str) -> bytes | None:
    """Content of the file as it is uploaded by this name, None if it goes as it is."""
    if name not in _FILES:
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    clean = _FILES[name](content)
    return None if clean == content else json.dumps(clean, indent=1).encode()
