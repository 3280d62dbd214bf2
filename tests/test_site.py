"""The documentation site: a strict build succeeds, pages load nothing from elsewhere, the reference is complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import polyrhythm
from polyrhythm.cli.main import commands
from polyrhythm.config.explain import paths_to
from polyrhythm.config.registry import known_types
from polyrhythm.config.schema import RunConfig
from polyrhythm.observe.metrics import documented
from polyrhythm.plugin import plugins

ROOT = Path(__file__).parents[1]
#: Attributes by which a page loads another file; `a href` only leads there.
_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class _Loaded(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "link" and found.get("rel") == "canonical":
            return
        self.addresses.append(found.get(_LOADS.get(tag, "")) or "")
        assert "mermaid" not in (found.get("class") or ""), "the theme loads mermaid from another host"


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        parser = _Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        away = [one for one in parser.addresses if re.match(r"(\w+:)?//", one)]
        assert away == [], page
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not any(re.search(r"(?:url\(|@import )[\"']?(?:\w+:)?//", style) for style in styles)


def _anchors(site: Path, page: str) -> set[str]:
    return set(re.findall(r'<h\d id="([^"]+)"', (site / page).read_text(encoding="utf-8")))


def _settings(site: Path) -> set[str]:
    """Dotted paths of the settings that the reference describes, without the types in them."""
    page = (site / "reference/settings.html").read_text(encoding="utf-8")
    return {re.sub(r"\[[^]]*\]", "", path) for path in re.findall(r'<h\d id="[^"]+"><code>([^<]+)</code>', page)}


def test_every_setting_metric_command_and_public_name_has_an_anchor(site: Path) -> None:
    own = (path for path in paths_to(None, RunConfig) if not path.startswith(("env.", "policy.")))
    # `loss[ppo].clip_low` is a key of a section with types, and type is not a key there.
    settings = {path for path in own if path.rpartition(".")[2] != "type"}
    assert sorted(settings - _settings(site)) == []
    there = _anchors(site, "reference/settings.html")
    assert {"training-optimizer-lr", "algorithm-loss-ppo-clip_low", "freshness-max_lag"} <= there
    assert {command.replace(" ", "-") for command in commands()} <= _anchors(site, "reference/commands.html")
    for kind, page in (("env", "environments"), ("policy", "policies")):
        assert set(known_types(kind)) <= _anchors(site, f"reference/{page}.html")  # type: ignore[arg-type]
    names = {f"polyrhythm-{name}" for name in polyrhythm.__all__ if not name.startswith("__")}
    assert names <= _anchors(site, "reference/python.html")
    metrics = (site / "reference/metrics.html").read_text(encoding="utf-8")
    written = [name.replace("<", "&lt;").replace(">", "&gt;") for one in documented() for name in one.names]
    assert [name for name in written if f"<code>{name}</code>" not in metrics] == []
    table = (site / "reference/plugins.html").read_text(encoding="utf-8")
    assert [name for name in plugins() if f"<code>{name}</code>" not in table] == []


def test_the_search_finds_a_setting_and_a_metric(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"] for entry in index["docs"]}
    assert {"reference/settings.html#training-versions", "reference/metrics.html#train-actor-policy_loss"} <= found
    assert (site / "search/search_index.js").is_file(), "for a site that is opened as a file"
