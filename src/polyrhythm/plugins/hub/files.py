"""The scheme `hf://`: repositories of the Hugging Face hub in huggingface_hub's own cache (`sources.FolderSource`).

Invariant: a name with a commit is read from the cache without asking the hub if its files are complete there.
Nothing prompts. A request waits 10 seconds for the hub's next bytes, and the client tries a download five times.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polyrhythm.errors import ConfigError, MissingError, first_line, install_command
from polyrhythm.plugins.hub.cleaning import cleaned_file
from polyrhythm.sources import Contents

log = logging.getLogger(__name__)

_NAME = re.compile(r"hf://(?:datasets/)?(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[^@\s]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Seconds that a request waits for the hub's next bytes.
_TIMEOUT_S = 10.0
#: Files that are read, by patterns that `hf download` understands: no optimizer states, pictures or other formats.
INCLUDE = {
    "model": (
        *("*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"),
        *("action_head--*.pt", "proprio_projector--*.pt"),
    ),
    "dataset": ("meta/*", "data/*", "videos/*"),
}
EXCLUDE = {"model": ("*/*.safetensors",), "dataset": ()}


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed name. text: as it was written; revision: a commit, branch or tag."""

    text: str
    repo: str
    revision: str
    contents: Contents
    what: str

    @classmethod
    def of(cls, text: str, contents: Contents, what: str) -> HubName:
        """ConfigError: the text has another form."""
        found = _NAME.fullmatch(text)
        dotted = found is not None and any(part[:1] in ("", ".") for part in (found["revision"] or "main").split("/"))
        if not found or dotted or ".." in found["repo"] or "--" in found["repo"]:
            raise ConfigError(f"{what} = {text}: it must look like hf://owner/name or hf://owner/name@revision")
        return cls(text, found["repo"], found["revision"] or "main", contents, what)

    @property
    def is_commit(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def command(self) -> str:
        """The command that downloads exactly the files that are read."""
        words = ["hf", "download", self.repo, "--revision", self.revision]
        words += ["--repo-type", "dataset"] if self.contents == "dataset" else []
        words += [word for one in INCLUDE[self.contents] for word in ("--include", one)]
        words += [word for one in EXCLUDE[self.contents] for word in ("--exclude", one)]
        return shlex.join(words)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the client's errors into one sentence each."""
        from huggingface_hub import errors

        what = f"{self.what} = {self.text}"
        try:
            yield
        except errors.GatedRepoError as error:
            raise ConfigError(
                f"{what}: {self.repo} is gated, and this account has no access; accept its conditions at "
                f"{_endpoint()}/{self.repo}, then hf auth login or set HF_TOKEN"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ConfigError(
                f"{what}: {self.repo} has no revision {self.revision}; name one of its branches, tags or commits"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"{what}: there is no {self.contents} {self.repo} on {_endpoint()} that this account may read; correct "
                "the name, or hf auth login or set HF_TOKEN if it is private"
            ) from error
        except errors.OfflineModeIsEnabled as error:
            raise self.missing("HF_HUB_OFFLINE is set") from error
        except errors.LocalEntryNotFoundError as error:
            raise self.missing(_reason(error)) from error
        except (errors.HTTPError, OSError) as error:  # a refusal or a fault of the hub, the network or the disk
            raise self._refused(error) from error

    def missing(self, why: str) -> MissingError:
        return MissingError(
            f"{self.what} = {self.text}: it is not, or not completely, in the cache {_cache()} ({why}); where there is "
            f"a connection run: {self.command}"
        )

    def _refused(self, error: Exception) -> ConfigError:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        what = f"{self.what} = {self.text}"
        if status in (401, 403):
            return ConfigError(
                f"{what}: {_endpoint()} refuses this account ({status}); hf auth login, or set HF_TOKEN to a token "
                "that may do this"
            )
        return MissingError(f"{what}: {_endpoint()}: {_reason(error)}; try again, or run: {self.command}")


def _reason(error: Exception) -> str:
    """The first line of the innermost of the client's errors."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"[:300]


def _client() -> Any:
    """The package huggingface_hub. MissingError: it is not installed."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingError(f"hf://: huggingface_hub is not installed; run: {install_command('hub')}") from error
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request
    return huggingface_hub


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or str(_client().constants.ENDPOINT)


def _cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or _client().constants.HF_HUB_CACHE).expanduser()


def _api() -> Any:
    return _client().HfApi(endpoint=_endpoint(), library_name="polyrhythm")


def pin(name: str, contents: Contents, what: str) -> str:
    """The name with the commit of its revision, by the hub or, without a connection, by the cache."""
    one = HubName.of(name, contents, what)
    if one.is_commit:
        return name
    _client()
    try:
        with one.errors():
            found = _api().repo_info(one.repo, revision=one.revision, repo_type=contents, timeout=_TIMEOUT_S).sha
    except MissingError:
        found = _cached_commit(one)
    if not found:
        return name
    log.info("%s: %s is %s", what, one.text, found)
    return f"{name.partition('@')[0]}@{found}"


def _cached_commit(one: HubName) -> str:
    """Commit of a branch or tag when it was last seen; "" if it never was."""
    refs = _cache() / f"{one.contents}s--{one.repo.replace('/', '--')}" / "refs"
    file = refs / one.revision
    text = file.read_text(errors="replace").strip() if file.is_file() else ""
    return text if _COMMIT.fullmatch(text) else ""


def folder(name: str, contents: Contents, what: str) -> Path:
    """The snapshot in the cache."""
    return _snapshot(HubName.of(name, contents, what), download=False)


def fetch(name: str, contents: Contents, what: str) -> Path:
    """The snapshot, downloaded first if the cache does not show that it is complete there."""
    one = HubName.of(name, contents, what)
    try:
        found = _snapshot(one, download=False)
        if _is_listed(one):
            return found
    except MissingError:
        pass
    log.info("%s: downloading %s of %s", what, ", ".join(INCLUDE[contents]), name)
    found = _snapshot(one, download=True)
    if not _is_listed(one):
        log.warning(
            "%s = %s: the hub does not answer, and the cache has no list of its files: some may be missing; where "
            "there is a connection run: %s",
            *(what, name, one.command),
        )
    return found


def _is_listed(one: HubName) -> bool:
    """Whether the cache has the list of the repository's files, by which the client tells what is missing."""
    client = _client()
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        client.get_cached_repo_tree(one.repo, repo_type=one.contents, revision=one.revision, cache_dir=_cache())
    except CachedRepoTreeNotFoundError:
        return False
    return True


def _snapshot(one: HubName, *, download: bool) -> Path:
    client = _client()
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    with one.errors():
        found = client.snapshot_download(
            one.repo,
            repo_type=one.contents,
            revision=one.revision,
            cache_dir=_cache(),
            endpoint=_endpoint(),
            allow_patterns=list(INCLUDE[one.contents]),
            ignore_patterns=list(EXCLUDE[one.contents]),
            etag_timeout=_TIMEOUT_S,
            local_files_only=not download,
            library_name="polyrhythm",
        )
    path = Path(found)
    if not (path.is_dir() and any(path.iterdir())):
        raise ConfigError(
            f"{one.what} = {one.text}: it has none of {', '.join(INCLUDE[one.contents])}; name a repository with "
            f"{'a checkpoint in safetensors' if one.contents == 'model' else 'a LeRobot dataset (v3.0)'}"
        )
    return path


def check_push(name: str, contents: Contents) -> HubName:
    """A name to upload to. ConfigError: it has a revision, or there is no token."""
    one = HubName.of(name, contents, "--push")
    if "@" in name:
        raise ConfigError(f"--push = {name}: a revision cannot be chosen, it is made; leave out @{one.revision}")
    if not _client().get_token():
        raise ConfigError(f"--push = {name}: this machine has no token; hf auth login, or set HF_TOKEN")
    with one.errors():
        _api().whoami()
    return one


def push(folder: Path, name: str, contents: Contents, *, public: bool, run: Path | None = None) -> str:
    """Upload the folder's files as `cleaning` leaves them, with a card, as one commit that deletes files of the same
    kinds of earlier revisions, into a new private repository unless there is one or `public` is set. The folder stays
    as it is."""
    from polyrhythm.plugins.hub.card import CARD, CURVE, SETTINGS, is_card, write_dataset_card, write_model_card

    one, api = check_push(name, contents), _api()
    with TemporaryDirectory() as temporary, one.errors():
        beside = Path(temporary)
        if contents == "dataset":
            write_dataset_card(beside, folder, one.repo)
        else:
            write_model_card(beside, run or folder, one.repo, whole=(folder / "policy.json").is_file())
        new = {str(file.relative_to(beside)): file for file in beside.iterdir()}
        new |= _files_of(folder, INCLUDE["dataset"] if contents == "dataset" else None)
        api.create_repo(one.repo, repo_type=contents, private=not public, exist_ok=True)
        there = api.list_repo_files(one.repo, repo_type=contents)
        own = folder / CARD
        if own.is_file() and not is_card(own.read_text(encoding="utf-8", errors="replace")):
            new[CARD] = own
        elif CARD in there and not is_card(_remote_text(one, CARD)):
            log.warning("--push = %s: its %s was not written by this command and stays", name, CARD)
            del new[CARD]
        done = api.create_commit(
            one.repo,
            repo_type=contents,
            operations=_operations(new, _matching(there, [*INCLUDE[contents], SETTINGS, CURVE])),
            commit_message="Upload by polyrhythm",
        )
    return f"hf://{one.repo}@{done.oid}"


def _files_of(folder: Path, patterns: Sequence[str] | None) -> dict[str, Path]:
    """Files of the folder by their names in the repository; a card is none of them."""
    found = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name: found[name] for name in _matching(found, patterns) if name != "README.md" and ".git" not in name}


def _matching(names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    _client()
    from huggingface_hub.utils import filter_repo_objects

    return list(filter_repo_objects(names, allow_patterns=None if patterns is None else list(patterns)))


def _remote_text(one: HubName, name: str) -> str:
    file = _client().hf_hub_download(
        one.repo, name, repo_type=one.contents, cache_dir=_cache(), endpoint=_endpoint(), etag_timeout=_TIMEOUT_S
    )
    return Path(file).read_text(encoding="utf-8", errors="replace")


def _operations(new: Mapping[str, Path], there: Iterable[str]) -> list[Any]:
    """What a commit adds and deletes."""
    client, found = _client(), list[Any]()
    for name, file in new.items():
        clean = cleaned_file(file, name)
        found.append(client.CommitOperationAdd(name, str(file) if clean is None else clean))
    return found + [client.CommitOperationDelete(name) for name in there if name not in new]
