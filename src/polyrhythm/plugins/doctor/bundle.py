"""Writes one archive for a bug report: versions, the doctor's findings and, of a run, its settings and logs' ends.

Invariant: only the files that are listed here are read, none through a link, and every text passes `Redaction`.
Weights, demonstrations, episodes, conversations and tokens of a run are never read. Redaction goes by names and forms,
so a secret of an unknown form in a log stays: the sender is told to read the archive first.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from polyrhythm.imports import count_cores
from polyrhythm.observe.run_folder import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    PROGRESS_FILE,
    SUMMARY_FILE,
)

#: Files of a run whose end is taken; and the pattern of its logs.
_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    PROGRESS_FILE,
    SUMMARY_FILE,
    EVALUATIONS_FILE,
    LEDGER_FILE,
    "settings_changes.jsonl",
)
_LOGS = "logs/**/*.log"
#: Maximum bytes of each file, from its end; and number of logs, the newest.
_TAIL, _MOST_LOGS = 100_000, 64
#: First words of the environment variables that change how a run behaves.
_VARIABLES = (
    "CUDA_", "EGL_", "HF_HUB_", "LANG", "LC_", "MKL_", "MUJOCO_", "NCCL_", "NVIDIA_", "OMP_", "POLYRHYTHM_",
    "PYOPENGL_", "PYTHON", "PYTORCH_", "RAY_", "SLURM_", "TORCH", "WANDB_MODE",
)  # fmt: skip
REDACTED = "[redacted]"
#: Names whose values are secret: of settings, of environment variables, and before = or : in any text.
_SECRET_NAME = re.compile(
    r"(?i)(token(?!s|_|izer)|token_file|secret|passw|passphrase|credential|authorization|api_?key|access_?key|private_?key|"
    r"(^|[._-])(auth|key|pat)$)"
)
_ASSIGNED = re.compile(
    r"(?i)([\w.-]*(?:token|secret|password|passwd|passphrase|api_?key|access_?key|credentials?)[\"']?\s*[=:]\s*)"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&}\])]+)"
)
_FORMS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}|(?<=basic )[A-Za-z0-9+/=]{8,}"),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),  # user:password@ of an address
    re.compile(r"\bhf_[A-Za-z0-9]{16,}\b|\bsk-[\w-]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"),
    re.compile(r"\bxox[abprs]-[\w-]{10,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bglpat-[\w-]{16,}|\bwandb_v1_\w{16,}"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # a JSON web token
    re.compile(r"\b[0-9a-fA-F]{40,}\b"),  # keys of trackers, of joining; also hashes
)


class Redaction:
    """Takes secrets out of text, and what names the user and the machine."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        secret = {value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= 6}
        self._values = [(value, REDACTED) for value in sorted(secret, key=len, reverse=True)]
        self._names = [(str(Path.home()), "~")] * (Path.home() != Path("/"))
        self._words = [(re.compile(rf"\b{re.escape(name)}\b"), word) for name, word in _identities() if len(name) > 2]

    def text(self, text: str) -> str:
        for value, word in (*self._values, *self._names):
            text = text.replace(value, word)
        for form in _FORMS:
            text = form.sub(REDACTED, text)
        text = _ASSIGNED.sub(lambda found: found[1] + (found[2] if _is_plain(found) else REDACTED), text)
        for pattern, word in self._words:
            text = pattern.sub(word, text)
        return text

    def plain(self, value: Any) -> Any:
        """Plain data whose secret keys have no values; its other texts are redacted."""
        if isinstance(value, dict):
            return {
                self.text(str(key)): REDACTED
                if inner and _SECRET_NAME.search(str(key)) and not _is_counted(inner)
                else self.plain(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self.plain(inner) for inner in value]
        return self.text(value) if isinstance(value, str) else value


def _identities() -> Iterator[tuple[str, str]]:
    yield socket.gethostname(), "HOST"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        return
    if user != "root":
        yield user, "USER"


def _is_counted(value: Any) -> bool:
    """Whether it is a number or a switch, as of `max_tokens: 64`, and no secret."""
    return isinstance(value, bool | int | float)


def _is_plain(found: re.Match[str]) -> bool:
    """Whether the value after such a name is a number or nothing: `tokens: 64`, `token: null`."""
    return (
        re.fullmatch(r"-?[\d.]{1,12}|null|none|true|false|\[redacted\].*", found[2].strip("\"'"), re.IGNORECASE)
        is not None
    )


def write_bundle(file: Path, findings: Iterable[Mapping[str, str]], run: Path | None = None) -> list[str]:
    """Write the archive, a .tar.gz; return the names in it. run: a run's folder, the caller's to find."""
    redaction, written = Redaction(os.environ), []
    contents = {
        "machine.json": _json(redaction.plain(_machine(list(findings)))),
        "packages.txt": "".join(f"{name}\n" for name in _packages()),
        **({} if run is None else _of_run(run, redaction)),
    }
    with file.open("xb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in contents.items():
            content = text.encode()
            entry = tarfile.TarInfo(f"polyrhythm-bug/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
            written.append(name)
    return written


def _machine(findings: list[Mapping[str, str]]) -> dict[str, Any]:
    from polyrhythm import __version__

    return {
        "polyrhythm": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": count_cores(),
        "devices": _devices(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "doctor": findings,
    }


def _devices() -> list[str]:
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603 - found on the PATH, without words of others
            query, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ["nvidia-smi does not answer"]
    return done.stdout.splitlines()


def _packages() -> list[str]:
    """Names and versions, without the addresses or folders that they came from."""
    return sorted({f"{one.metadata['Name']}=={one.version}" for one in metadata.distributions()}, key=str.lower)


def _of_run(folder: Path, redaction: Redaction) -> dict[str, str]:
    inside = folder.resolve()
    logs = [path for path in folder.glob(_LOGS) if path.is_file()]
    logs = sorted(logs, key=lambda path: path.stat().st_mtime)[-_MOST_LOGS:]
    taken = {}
    for path in (*(folder / name for name in _FILES), *sorted(logs)):
        name = path.relative_to(folder)
        if path.is_file() and path.resolve() == inside / name:  # not through a link
            text = _tail(path)
            if name == Path(CONFIG_FILE):
                text = _settings(text, redaction)
            taken[f"run/{name}"] = redaction.text(text)
    return taken


def _settings(text: str, redaction: Redaction) -> str:
    """The settings as YAML with secret values redacted by their keys; as they are if they cannot be read."""
    import yaml

    from polyrhythm.config.recipes import parse
    from polyrhythm.errors import ConfigError

    try:
        return yaml.safe_dump(redaction.plain(parse(text, CONFIG_FILE)), sort_keys=False)
    except ConfigError:
        return text


def _tail(path: Path) -> str:
    """The last `_TAIL` bytes, from the beginning of a line."""
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - _TAIL)
        file.seek(begin)
        text = file.read(_TAIL).decode(errors="replace")
    return text if not begin else f"[the last {_TAIL} bytes]\n{text.partition(chr(10))[2]}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
