"""`polyrhythm watch`: the server answers this machine only, sends what changed, and ends by a signal."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.long import long

from polyrhythm.cli.main import main
from polyrhythm.errors import RunFolderError, StartError
from polyrhythm.observe.metrics import MetricsWriter, rewind
from polyrhythm.plugins.report.increments import apply
from polyrhythm.plugins.report.live import LiveRun
from polyrhythm.plugins.report.server import PageServer

VIDEO = bytes(range(256)) * 4


def write_updates(folder: Path, first: int, last: int) -> None:
    with MetricsWriter(folder) as metrics:
        for update in range(first, last):
            values = {
                "env/episodes": 40.0,
                "env/return": float(update),
                "train/actor/entropy_loss": 0.5,
                "throughput/transitions": 100.0 * (update + 1),
                "throughput/transitions_per_s": 10.0,
            }
            metrics.log(update, values, 5.0 * (update + 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "recipe" / "run"
    write_updates(found, 0, 4)
    (found / "config.yaml").write_text("seed: 0\nname: <b>recipe\n")
    (found / "gallery").mkdir()
    (found / "gallery" / "a.mp4").write_bytes(VIDEO)
    episode = {"evaluation": "eval", "version": 1, "mode": "greedy", "index": 0, "seed": 2**60 + 1, "task": "<i>push"}
    episode |= {"success": True, "return": 1.0, "length": 9, "video": "a.mp4"}
    (found / "gallery" / "episodes.jsonl").write_text(json.dumps(episode) + "\n")
    return found


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]


Ask = Callable[..., Answer]


@pytest.fixture
def ask(folder: Path) -> Iterator[Ask]:
    """Send a request to the server of the folder; it ends with the test."""
    with PageServer(LiveRun(folder, count(0.0, 100.0).__next__)) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()

        def send(path: str, method: str = "GET", **headers: str) -> Answer:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            try:
                connection.request(method, path, headers={name.replace("_", "-"): x for name, x in headers.items()})
                answer = connection.getresponse()
                return Answer(answer.status, answer.read(), dict(answer.getheaders()))
            finally:
                connection.close()

        send.port = server.port  # type: ignore[attr-defined]
        yield send
        server.stop()
        thread.join()


def since(ask: Ask, state: str) -> dict[str, Any]:
    answer = ask(f"/data.json?after={state}")
    assert answer.status == 200
    found: dict[str, Any] = json.loads(answer.body)
    return found


def chart(data: dict[str, Any], name: str) -> Any:
    return next(part for one in data["sections"] for part in one["parts"] if part.get("id") == name)


def test_the_page_holds_the_data_and_the_script_that_polls(ask: Ask) -> None:
    answer = ask("/")
    assert answer.status == 200
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    text = answer.body.decode()
    assert "startLive" in text
    assert "<b>recipe" not in text
    assert "<i>push" not in text
    assert ask("/", "HEAD").body == b""
    assert json.loads(ask("/data.json").body)["data"]["title"] == "recipe/run"


def test_other_names_of_this_machine_are_refused(ask: Ask) -> None:
    port = ask.port  # type: ignore[attr-defined]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"LOCALHOST:{port}"):
        assert ask("/", Host=host).status == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        f"127.0.0.1.evil.example:{port}",
        "127.0.0.1",
        "",
        f"[::1]:{port}",
    ):
        for path in ("/", "/data.json", "/gallery/a.mp4"):
            answer = ask(path, Host=host)
            assert answer.status == 421
            assert b"recipe" not in answer.body


def test_nothing_but_reading_is_answered(ask: Ask, folder: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask("/", method).status == 501
    for path in ("/config.yaml", "/gallery/", "/gallery", "/data.json/x", "/%2e%2e/config.yaml", "/favicon.ico"):
        assert ask(path).status == 404
    ask("/")
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_only_videos_of_the_gallery_are_served(ask: Ask, folder: Path) -> None:
    (folder / "gallery" / "link.mp4").symlink_to(folder / "config.yaml")
    (folder / "gallery" / "folder.mp4").mkdir()
    (folder / "secret.mp4").write_bytes(b"secret")
    os.mkfifo(folder / "gallery" / "pipe.mp4")
    names = (
        "link.mp4",
        "folder.mp4",
        "pipe.mp4",
        "episodes.jsonl",
        "../secret.mp4",
        "%2e%2e/secret.mp4",
        "..",
        "b.mp4",
    )
    for name in names:
        assert ask(f"/gallery/{name}").status == 404
    answer = ask("/gallery/a.mp4")
    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (200, VIDEO, "video/mp4")


@pytest.mark.parametrize(
    ("wanted", "status", "first", "last"),
    [
        ("bytes=0-", 200, 0, 1023),
        ("bytes=0-9", 206, 0, 9),
        ("bytes=1000-5000", 206, 1000, 1023),
        ("bytes=-24", 206, 1000, 1023),
        ("bytes=1024-", 416, 0, -1),
        ("bytes=9-5", 416, 0, -1),
        ("bytes=-", 200, 0, 1023),
        ("bytes=0-1,4-5", 200, 0, 1023),
        ("lines=0-9", 200, 0, 1023),
    ],
)
def test_a_range_of_a_video_is_served(ask: Ask, wanted: str, status: int, first: int, last: int) -> None:
    answer = ask("/gallery/a.mp4", Range=wanted)
    assert answer.status == status
    assert answer.body == VIDEO[first : last + 1]
    if status == 206:
        assert answer.headers["Content-Range"] == f"bytes {first}-{last}/1024"


@pytest.mark.parametrize("wanted", ["", "bytes=0-", "bytes=5-", "bytes=-5", "bytes=0-0"])
def test_an_empty_video_is_whole(ask: Ask, folder: Path, wanted: str) -> None:
    (folder / "gallery" / "empty.mp4").write_bytes(b"")
    answer = ask("/gallery/empty.mp4", Range=wanted)
    assert (answer.status, answer.body, answer.headers["Content-Length"]) == (200, b"", "0")


def test_a_page_gets_what_changed(ask: Ask, folder: Path) -> None:
    found = json.loads(ask("/data.json").body)
    state, data = found["state"], found["data"]
    assert since(ask, state)["changes"] == []
    write_updates(folder, 4, 7)
    found = since(ask, state)
    data = apply(data, found["changes"])
    assert data == json.loads(ask("/data.json").body)["data"]
    entropy = chart(data, "metric-train/actor/entropy_loss")["series"][0]
    assert entropy["x"]["transitions"][-1] == 700.0
    assert any("append" in change for change in found["changes"]), "a curve that grows is not sent anew"
    assert len(json.dumps(found)) < len(json.dumps(data)) / 3
    for unknown in ("", "x", "0.0", f"{state.partition('.')[0]}.99", f"{state}.1", "-1", "9" * 40):
        assert since(ask, unknown)["data"] == data


def test_a_run_that_is_resumed_is_followed(ask: Ask, folder: Path) -> None:
    found = json.loads(ask("/data.json").body)
    rewind(folder, 2)
    write_updates(folder, 2, 3)
    later = since(ask, found["state"])
    data = apply(found["data"], later["changes"])
    entropy = chart(data, "metric-train/actor/entropy_loss")["series"][0]
    assert entropy["x"]["transitions"] == [100.0, 200.0, 300.0]


def test_a_run_that_cannot_be_read_for_a_while_keeps_its_page(ask: Ask, folder: Path) -> None:
    state = json.loads(ask("/data.json").body)["state"]
    (folder / "progress.json").write_text("{")
    found = since(ask, state)
    assert (found["state"], found["changes"]) == (state, [])
    assert "progress.json" in found["trouble"]
    (folder / "progress.json").unlink()
    assert since(ask, state)["trouble"] == ""
    folder.rename(folder.with_name("moved"))
    assert "is not there" in since(ask, state)["trouble"]
    assert ask("/").status == 200
    folder.with_name("moved").rename(folder)
    assert since(ask, state) == {"state": state, "trouble": "", "changes": []}


def test_a_large_run_is_not_read_all_the_time(folder: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # as if each reading took a second
        return now[0]

    live = LiveRun(folder, clock)
    state = live.state
    write_updates(folder, 4, 5)
    assert live.since(state)["changes"] != [], "the first reading, which imports, does not count"
    state = live.state
    write_updates(folder, 5, 6)
    assert live.since(state)["changes"] == [], "the last reading was not long ago"
    now[0] += 1000.0
    assert live.since(state)["changes"] != []
    state = live.state
    now[0] += 1000.0
    assert live.since(state)["changes"] == []


def test_readings_that_fail_rest_too(folder: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # as if each reading took a second
        return now[0]

    live = LiveRun(folder, clock)
    (folder / "progress.json").write_text("{")
    assert "progress.json" in live.since(live.state)["trouble"]
    (folder / "progress.json").unlink()
    assert live.since(live.state)["trouble"] != "", "the last reading was not long ago"
    now[0] += 1000.0
    assert live.since(live.state)["trouble"] == ""


def test_what_is_no_run_or_port_is_refused(folder: Path, tmp_path: Path) -> None:
    for nothing in (folder / "gallery", folder / "config.yaml"):
        with pytest.raises(RunFolderError, match=r"is not a run's folder.*name the folder of a run"):
            LiveRun(nothing)
    with pytest.raises(RunFolderError, match=r"none is not there; name the folder of a run"):
        LiveRun(tmp_path / "none")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartError, match="cannot be opened"):
            PageServer(LiveRun(folder), taken.getsockname()[1])


# ------------------------------------------------------------ the command, as a process


@pytest.fixture
def watch(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of `polyrhythm watch`, and its URL."""
    words = [sys.executable, "-m", "polyrhythm", "watch", str(folder.parent)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), process.communicate(timeout=30)
        assert f" shows {folder};" in line, "the run, not the folder of runs"
        yield process, line.split()[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "vacant",
    [*(pytest.param(one, marks=long(3, "the folder is not there")) for one in ("missing", "empty")), "parent"],
)
def test_a_run_that_is_about_to_start_is_waited_for(folder: Path, tmp_path: Path, vacant: str) -> None:
    named, new = tmp_path / "new", tmp_path / "new" / "20260101-000000"
    if vacant == "empty":
        named.mkdir()
    elif vacant == "parent":
        new.mkdir(parents=True)
        (new / ".lock").touch()
    words = [sys.executable, "-m", "polyrhythm", "watch", str(named)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "no run there yet, waiting" in process.stderr.readline()
            new.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "config.yaml", new / "config.yaml")
            assert process.stdout.readline().startswith("http://127.0.0.1:")
        finally:
            process.kill()


def test_a_folder_of_other_files_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").touch()
    for named in (tmp_path, tmp_path / "notes.txt"):
        assert main(["watch", str(named)]) == 2
        told = capsys.readouterr().err
        assert "is not a run's folder" in told
        assert "waiting" not in told


def test_ctrl_c_ends_the_command(watch: tuple[subprocess.Popen[str], str]) -> None:
    process, url = watch
    port = int(url.rstrip("/").rpartition(":")[2])
    open_one = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    open_one.request("GET", "/data.json")
    assert open_one.getresponse().read()
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in complaints
    assert complaints.count("its newest is taken") == 1
    open_one.close()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
