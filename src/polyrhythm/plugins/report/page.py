"""Assembles a page as one self-contained HTML file, from its data and the scripts and styles in `assets/`.

The data are JSON in an element that no browser runs; scripts put texts into the page as text nodes only. A content
security policy allows the page's own scripts and styles, by their hashes, and nothing from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write
from polyrhythm.observe.run_folder import REPORT_FILE, find_run
from polyrhythm.plugins.report.data import page_data
from polyrhythm.plugins.report.gallery import embed_videos
from polyrhythm.plugins.report.read import Run, read_run

COMPARISON_FILE = "comparison.html"
#: Files of `assets/`, in the order of the page. A script uses functions of those before it; see each file's head.
STYLES = ("uplot/uPlot.min.css", "page.css", "episodes.css")
SCRIPTS = (
    *("uplot/uPlot.iife.min.js", "dom.js", "numbers.js", "parts.js"),
    *("charts.js", "timeline.js", "episodes.js", "page.js"),
)
_POLICY = (
    "default-src 'none'; img-src data: blob: 'self'; media-src data: blob: 'self'; connect-src 'self'; "
    "script-src {scripts}; style-src {styles}"
)
#: Characters that end an element or, in old JavaScript, a line.
_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def live_html(data: Mapping[str, Any], state: str) -> str:
    """The page of these data that asks its server for what has changed since `state`."""
    return html({**data, "live": state}, ("live.js",))


def html(data: Mapping[str, Any], scripts: Sequence[str] = ()) -> str:
    """The page of these data. scripts: more files of `assets/`, after the others."""
    script_texts = [asset(name) for name in (*SCRIPTS, *scripts)]
    style_texts = [asset(name) for name in STYLES]
    policy = _POLICY.format(scripts=_hashes(script_texts), styles=_hashes(style_texts))
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=True)}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<title>{escape(str(data['title']))} · Polyrhythm</title>\n"
    )
    styled = "\n".join(f"<style>{text}</style>" for text in style_texts)
    scripted = "\n".join(f"<script>{text}</script>" for text in script_texts)
    body = (
        "</head>\n<body><noscript>This page draws its figures with JavaScript, which is switched off.</noscript>\n"
        f'<main id="page"></main>\n<script type="application/json" id="data">{encoded(data)}</script>\n'
    )
    return f"{head}{styled}\n{body}{scripted}\n</body></html>\n"


def encoded(data: Mapping[str, Any]) -> str:
    """The data as JSON that can stand inside a script element, whatever its texts are."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate, which JSON may hold, has no UTF-8.
    return text.translate(_ESCAPED).encode("utf-8", "backslashreplace").decode("utf-8")


def asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hashes(texts: Sequence[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the page of this run, and return its path: by default the run's report.html.

    RunFolderError: the folder is not a run's, or the page cannot be written.
    """
    folder = find_run(folder)
    run = read_run(folder)
    return _write([run], path or folder / REPORT_FILE)


def write_comparison(runs: Sequence[Run], path: Path | None = None) -> Path:
    """Write the page that compares these runs, and return its path: by default comparison.html beside the first."""
    return _write(runs, path or runs[0].folder.resolve().parent / COMPARISON_FILE)


def _write(runs: Sequence[Run], path: Path) -> Path:
    try:
        data = page_data(runs)
        text = html(embed_videos(data, runs[0].folder) if len(runs) == 1 else data)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = " or ".join(str(run.folder) for run in runs)
        raise RunFolderError(
            f"a file in {names} has invalid content ({type(error).__name__}: {error}); if it was not edited, "
            "please report this with the folder"
        ) from error
    try:
        with atomic_write(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error.strerror}); name another with --out") from error
    return path
