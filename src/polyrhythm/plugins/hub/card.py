"""README.md of an uploaded policy or dataset, with the run's settings, evaluations and curve.

The settings are those of `cleaning.clean_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.files import parse_json
from polyrhythm.observe.run_folder import CONFIG_FILE, run_of
from polyrhythm.plugins.hub.cleaning import clean_config, without_paths
from polyrhythm.plugins.report.read import Measured, Run, read_run, training_points
from polyrhythm.readable import markdown_table

CARD, CURVE, SETTINGS = "README.md", "success.png", CONFIG_FILE
#: Size of the curve in pixels, and its margins.
_SIZE, _MARGIN = (720, 320), (52, 20, 20, 36)
_DATASET_FILE = "meta/info.json"
_POLICY_LINE = "A policy trained with reinforcement learning by Polyrhythm."
_DATASET_LINE = "Demonstrations in the layout of LeRobotDataset v3.0, recorded by Polyrhythm."


def is_card(text: str) -> bool:
    """Whether a README.md is a card of this module."""
    return any(f"\n{line}\n" in text for line in (_POLICY_LINE, _DATASET_LINE))


def write_model_card(folder: Path, run: Path, name: str, *, whole: bool = False) -> None:
    """Write the card of an exported policy into `folder`, with config.yaml and the curve of its run, if that is there.
    run: the run's folder or a file or checkpoint in it; name: of the repository; whole: the export has policy.json."""
    home = run_of(run, above=3)
    head = {"library_name": "polyrhythm", "tags": ["reinforcement-learning", "robotics"], "pipeline_tag": "robotics"}
    parts = [f"# {name.rpartition('/')[2]}", _POLICY_LINE]
    if home is not None:
        read = read_run(home)
        settings = clean_config(yaml.safe_load(read.config))
        base = str(settings["policy"].get("checkpoint") or "")
        if base.startswith("hf://"):
            head["base_model"] = base.removeprefix("hf://").partition("@")[0]
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        (folder / SETTINGS).write_text(text, encoding="utf-8")
        parts += _result(read, folder) + _data(settings)
        parts += ["## Train it again", _block(f"polyrhythm train {SETTINGS}"), f"All settings are in {SETTINGS}:"]
        parts += [f"<details><summary>settings</summary>\n\n{_block(text, 'yaml')}\n\n</details>"]
    use = f"polyrhythm eval hf://{name}" if whole else f'policy: {{checkpoint: "hf://{name}"}}'
    parts[2:2] = ["## Use", _block(use, "" if whole else "yaml")]
    _write(folder, head, parts)


def write_dataset_card(folder: Path, dataset: Path, name: str) -> None:
    """Write the card of a dataset that `polyrhythm demos` has recorded into `folder`. dataset: its folder."""
    info = parse_json((dataset / _DATASET_FILE).read_text(encoding="utf-8"))
    recorded = dataset / "meta" / "polyrhythm.json"
    how = parse_json(recorded.read_text(encoding="utf-8")).get("recorded", {}) if recorded.is_file() else {}
    rows = [(key, info.get(key, "")) for key in ("codebase_version", "total_episodes", "total_frames", "fps")]
    head = {"tags": ["LeRobot", "robotics"], "task_categories": ["robotics"]}
    use = f"demonstrations:\n  dataset: {{folder: 'hf://{name}'}}"
    parts = [f"# {name.rpartition('/')[2]}", _DATASET_LINE]
    parts += ["## Use", _block(use, "yaml"), "## Content", markdown_table(("", ""), rows)]
    if how:
        parts += ["## How it was recorded", _block(json.dumps(without_paths(how), indent=2), "json")]
    _write(folder, head, parts)


def _write(folder: Path, head: Mapping[str, Any], parts: list[str]) -> None:
    front = yaml.safe_dump(dict(head), sort_keys=False)
    (folder / CARD).write_text(f"---\n{front}---\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")


def _result(run: Run, folder: Path) -> list[str]:
    rows = [(one.way, f"{one.transitions:,.0f}", _success(one), f"{one.mean_return:.4g}") for one in run.evaluations]
    if not rows:
        return []
    found = [
        "## Evaluations",
        markdown_table(("actions", "transitions before it", "success [95% interval]", "return"), rows),
    ]
    if draw_curve(run, folder / CURVE):
        found += [f"![success over transitions]({CURVE})", "Line: training episodes. Points: evaluations. Bars: 95%."]
    return found


def _success(one: Measured) -> str:
    return f"{one.success.rate:.1%} [{one.success.low:.1%}, {one.success.high:.1%}]" if one.success else "not reported"


def _data(settings: Mapping[str, Any]) -> list[str]:
    told = {key: settings[key] for key in ("env", "demonstrations") if settings.get(key)}
    return ["## Data", _block(yaml.safe_dump(told, sort_keys=False, allow_unicode=True), "yaml")]


def _block(text: str, language: str = "") -> str:
    """The text as a block of code; its own fences cannot end it."""
    return f"````{language}\n{text.rstrip().replace('````', '')}\n````"


def draw_curve(run: Run, file: Path) -> bool:
    """Draw success over transitions as a PNG; False if there are not two points."""
    from PIL import Image, ImageDraw

    trained = [(p.transitions, p.success) for p in training_points(run) if p.success]
    measured = [(m.transitions, m.success) for m in run.evaluations if m.success and m.way == "greedy"]
    last = max((x for x, _ in trained + measured), default=0.0)
    if len(trained) + len(measured) < 2 or not last:
        return False
    left, top, right, bottom = _MARGIN
    (width, height) = _SIZE

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / last * (width - left - right), top + (1 - y) * (height - top - bottom)

    image = Image.new("RGB", _SIZE, "white")
    draw = ImageDraw.Draw(image)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        draw.line([at(0, share), at(last, share)], fill="#dddddd")
        draw.text((8, at(0, share)[1] - 6), f"{share:.0%}", fill="#444444")
    draw.text((left, height - 24), "0", fill="#444444")
    draw.text((width - 150, height - 24), f"{last:,.0f} transitions", fill="#444444")
    if len(trained) > 1:
        draw.line([at(x, s.rate) for x, s in trained], fill="#1f6f8b", width=2)
    for x, success in measured:
        draw.line([at(x, success.low), at(x, success.high)], fill="#b5442e", width=2)
        (a, b) = at(x, success.rate)
        draw.ellipse([a - 4, b - 4, a + 4, b + 4], fill="#b5442e")
    image.save(file)
    return True
