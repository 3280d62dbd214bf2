"""A hub on loopback: the part of the Hugging Face hub's HTTP interface that huggingface_hub's client uses to find,
download and upload files. Files and commits are in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
_REGULAR = {"uploadMode": "regular", "shouldIgnore": False}


class LocalHub:
    """Repositories by "models/owner/name": branches, commits of files, and who may read them.

    gated: repositories of which only the listing is public. broken: files whose content ends early. requests: all that
    was asked, as "METHOD path".
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.private: dict[str, bool] = {}
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.requests: list[str] = []

    def commit(self, repo: str, files: dict[str, bytes], without: Collection[str] = ()) -> str:
        """Add files to the branch main, and take others away, as a new commit; returns its hash."""
        commits, branches = self.repos.setdefault(repo, {}), self.branches.setdefault(repo, {})
        before = commits.get(branches.get("main", ""), {})
        whole = {name: data for name, data in before.items() if name not in without} | files
        name = hashlib.sha1(repr((repo, len(commits), sorted(whole.items()))).encode()).hexdigest()
        commits[name], branches["main"] = whole, name
        return name

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.branches.get(repo, {}).get(revision, revision)
        found = self.repos.get(repo, {}).get(commit)
        return None if found is None else (commit, found)

    def downloads(self) -> list[str]:
        """Names of the files that were downloaded."""
        parts = [line.split("/resolve/")[1].split("/", 1)[1] for line in self.requests if line.startswith("GET ")
                 and "/resolve/" in line]  # fmt: skip
        return sorted(parts)

    @contextmanager
    def served(self) -> Iterator[str]:
        """Serve on loopback; gives the address."""

        class Handler(_Handler):
            hub = self

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def _route(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{method} /{path}")
        if path.startswith("api/"):
            self._api(method, path.removeprefix("api/"), body)
        elif "/resolve/" in path:
            repo, _, rest = path.partition("/resolve/")
            self._resolve(method, repo if repo.startswith("datasets/") else f"models/{repo}", *rest.split("/", 1))
        else:
            self._refuse(404, "EntryNotFound")

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _api(self, method: str, path: str, body: bytes) -> None:
        if path == "whoami-v2" and self._known:
            self._json({"name": "me", "type": "user"})
        elif path == "validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "whoami-v2" or (method == "POST" and not self._known):
            self._refuse(401, "")
        elif path == "repos/create":
            self._create(json.loads(body))
        elif path.count("/") < 2:
            self._refuse(404, "EntryNotFound")
        else:
            kind, owner, name, *rest = path.split("/")
            repo, revision = f"{kind}/{owner}/{name}", "/".join(rest[1:]) or "main"
            found = self.hub.files(repo, revision)
            if repo not in self.hub.repos:
                self._refuse(401, "RepoNotFound")
            elif found is None:
                self._refuse(404, "RevisionNotFound")
            else:
                self._on_revision(rest[0] if rest else "revision", repo, *found, body)

    def _create(self, told: dict[str, Any]) -> None:
        owner, _, name = told["name"].rpartition("/")
        owner = told.get("organization") or owner or "me"
        repo = f"{told.get('type', 'model')}s/{owner}/{name}"
        if repo in self.hub.repos:
            self._json({"error": "it exists", "url": self._url(repo)}, 409)
        elif owner != "me":
            self._refuse(403, "")
        else:
            self.hub.private[repo] = bool(told.get("private")) or told.get("visibility") == "private"
            self.hub.commit(repo, {})
            self._json({"url": self._url(repo)})

    def _url(self, repo: str) -> str:
        return f"http://{self.headers['Host']}/{repo.removeprefix('models/')}"

    def _on_revision(self, action: str, repo: str, commit: str, files: dict[str, bytes], body: bytes) -> None:
        if action == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": repo.split("/", 1)[1], "sha": commit, "siblings": siblings, "private": False})
        if action == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self._json(entries)
        if action == "preupload":
            asked = json.loads(body)["files"]
            return self._json({"files": [{"path": f["path"], **_REGULAR} for f in asked]})
        if action == "commit":
            lines = [json.loads(line) for line in body.splitlines() if line]
            added = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            deleted = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
            made = self.hub.commit(repo, added, deleted)
            return self._json({"commitUrl": f"{self._url(repo)}/commit/{made}", "commitOid": made})
        return self._refuse(404, "EntryNotFound")

    def _resolve(self, method: str, repo: str, revision: str, name: str) -> None:
        found = self.hub.files(repo, revision)
        if found is None or name not in found[1]:
            return self._refuse(404, "EntryNotFound")
        if repo in self.hub.gated and not self._known:
            return self._refuse(403, "GatedRepo")
        commit, data = found[0], found[1][name]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if method == "GET" and name in self.hub.broken:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif method == "GET":
            self.wfile.write(data)
        return None

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
