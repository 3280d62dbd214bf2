"""`polyrhythm watch` in a real browser: it follows the run, keeps filters, plays videos, and texts stay texts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.plugins.report.live import LiveRun
from polyrhythm.plugins.report.page import write_report
from polyrhythm.plugins.report.server import PageServer
from polyrhythm_bench.browser import Page, chromium

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")

HOSTILE = "</script><img src=x onerror=alert(1)>"
CARDS = "[...document.querySelectorAll('#gallery article h4')].map((one) => one.textContent)"


def add_episodes(folder: Path, version: int, count: int) -> None:
    (folder / "gallery").mkdir(exist_ok=True)
    for index in range(count):
        name = f"v{version}-{index}.webp"
        frames = [Image.new("RGB", (64, 64), (30 * index, 99, 9 * frame)) for frame in range(3)]
        frames[0].save(folder / "gallery" / name, save_all=True, append_images=frames[1:], duration=100)
        entry: dict[str, Any] = {
            "evaluation": "eval",
            "version": version,
            "mode": "greedy",
            "index": index,
            "seed": 2**60 + index,
        }
        entry |= {
            "task": HOSTILE if index % 2 else "door",
            "success": index < 2,
            "return": 1.0,
            "length": 9,
            "video": name,
        }
        with (folder / "gallery" / "episodes.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def train(folder: Path, first: int, last: int) -> None:
    with MetricsWriter(folder) as metrics:
        for update in range(first, last):
            values = {"env/episodes": 32.0, "env/return": 1.0, "train/actor/entropy_loss": 1.0}
            values |= {"throughput/transitions": 100.0 * (update + 1), "throughput/transitions_per_s": 9.0}
            metrics.log(update, values, 10.0 + update)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "run"
    train(found, 0, 5)
    (found / "config.yaml").write_text("seed: 0\n")
    add_episodes(found, 1, 4)
    turns = [{"message": HOSTILE, "reply": "no"}, {"message": "x" * 2000, "reply": ""}]
    said = {
        "evaluation": "after",
        "version": 1,
        "index": 0,
        "task": "sums",
        "seed": 7,
        "prompt": HOSTILE,
        "turns": turns,
    }
    said |= {"success": True, "return": 1.0, "metrics": {}}
    (found / "conversations.jsonl").write_text(
        json.dumps(said) + "\n" + json.dumps({**said, "index": 1, "prompt": "2+2"})
    )
    return found


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    with PageServer(LiveRun(folder, count(0.0, 100.0).__next__)) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield server.url
        server.stop()
        thread.join()


def choose(page: Page, section: str, what: str, value: str) -> None:
    selector = json.dumps(f"#{section} [aria-label^='{what}']")
    page.evaluate(
        f"{{const one = document.querySelector({selector}); one.value = {json.dumps(value)};"
        "one.dispatchEvent(new Event('change')); one.dispatchEvent(new Event('input'));}"
    )


def test_a_page_follows_its_run_and_keeps_its_filters(url: str, folder: Path) -> None:
    with Page() as page:
        page.open(url)
        assert page.evaluate(CARDS) == ["door", HOSTILE, "door", HOSTILE]
        choose(page, "gallery", "task", HOSTILE)
        choose(page, "gallery", "outcome", "success")
        assert page.evaluate(CARDS) == [HOSTILE]
        page.wait(
            "[...document.querySelectorAll('#gallery img')].every((one) => one.complete && one.naturalWidth === 64)"
        )
        add_episodes(folder, 2, 2)
        train(folder, 5, 9)
        page.wait(f"{CARDS}.length === 2")
        assert page.evaluate(CARDS) == [HOSTILE] * 2
        entropy = "page.data.sections.flatMap((one) => one.parts).find((one) => /entropy/.test(one.id))"
        assert page.evaluate(f"{entropy}.series[0].x.transitions")[-1] == 900.0
        choose(page, "gallery", "version", "1")
        assert page.evaluate(CARDS) == [HOSTILE]
        assert page.evaluate("document.querySelector('p.live').textContent") == "Live: this page refreshes itself."
        (folder / "config.yaml").rename(folder / "away")
        page.wait("/config.yaml/.test(document.querySelector('p.live').textContent)")
        assert page.errors == []


def test_conversations_are_searched_and_their_texts_stay_texts(url: str) -> None:
    with Page(390, 844, touch=True) as page:
        page.open(url)
        prompts = "[...document.querySelectorAll('#conversations .prompt span')].map((one) => one.textContent)"
        assert page.evaluate(prompts) == [HOSTILE, "2+2"]
        choose(page, "conversations", "text", "2+2")
        assert page.evaluate(prompts) == ["2+2"]
        choose(page, "conversations", "text", "nowhere")
        assert page.evaluate(prompts) == []
        assert page.evaluate("document.querySelectorAll('#conversations img, main script').length") == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []


def test_a_file_holds_its_videos(folder: Path, tmp_path: Path) -> None:
    path = write_report(folder, tmp_path / "alone.html")
    (folder / "gallery").rename(folder / "elsewhere")
    with Page(dark=True) as page:
        page.open(path.as_uri())
        page.wait(
            "[...document.querySelectorAll('#gallery img')].every((one) => one.complete && one.naturalWidth === 64)"
        )
        assert len(page.evaluate(CARDS)) == 4
        assert page.errors == []
