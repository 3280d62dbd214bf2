"""Draw the figures of docs/tuning.md and of the recipe pages: `python bench/scripts/docs_figures.py [RUNS]`.

RUNS is a folder with the runs that docs/tuning.md names, as `polyrhythm train ... --out RUNS/NAME` wrote them:
lr_base_1, lr_high_1, lr_low_1, one_1 and the same with 2 (the seed), wait_0 and wait_1 (the lag). Without it only the
charts of the recipe pages are drawn, from the tables of results in docs/recipes/.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "figures"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 62, 34, 44
COLOURS = ("#2a6fb0", "#c4572b", "#7a8a2e")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#59636e}.name{fill:#1c2126}.grid{stroke:#d5dae0}"
    "@media(prefers-color-scheme:dark){text,.name{fill:#c9d1d9}.grid{stroke:#3d444d}}"
)
#: Key in a line of metrics, and what the axis is called.
Axis = tuple[str, str]
STEPS: Axis = ("throughput/transitions", "environment steps")
MEMORY = re.compile(r"^\| (?:π0(?:\.5)? \| )?([\d.]+(?: \| [\d.]+){4}) \|$", re.MULTILINE)
TRAINED = ("all", "expert", "lora")
RESULT = re.compile(
    r"^\|\s*([^|]*?)\s*\| (?:(\w[^|]*) \| )?(\d+)%? \[(\d+), (\d+)\] \| (\d+)%? \[(\d+), (\d+)\]", re.MULTILINE
)


def main() -> None:
    if len(sys.argv) > 1:
        runs = Path(sys.argv[1])
        rates = {"2e-3, the recipe": "lr_base", "0.05": "lr_high", "5e-5": "lr_low"}
        curves(runs, "tuning_lr", rates, STEPS, ("env/return", "return"))
        steps = {"many optimizer steps, the recipe": "lr_base", "one optimizer step": "one"}
        curves(runs, "tuning_steps", steps, STEPS, ("env/return", "return"))
        lags = {"max_lag 0": "wait_0", "max_lag 1": "wait_1"}
        curves(runs, "tuning_lag", lags, ("time_s", "seconds of training"), STEPS, seeds=("",))
    bars("language", "recipes/language.md", "greedy success on 512 held-out problems, 95% intervals")
    memory()
    bars("simulators", "recipes/simulators.md", "greedy success on held-out episodes, 95% intervals")


def curves(
    runs: Path, name: str, names: Mapping[str, str], x: Axis, y: Axis, seeds: Sequence[str] = ("_1", "_2")
) -> None:
    """Draw one curve per run and seed, equal colours for equal settings."""
    lines = {label: [_points(runs / f"{run}{seed}", x[0], y[0]) for seed in seeds] for label, run in names.items()}
    every = [point for found in lines.values() for line in found for point in line]
    right, high = (_round(max(point[side] for point in every)) for side in (0, 1))
    parts = _axes(right, high, x[1], y[1])
    at = LEFT + 10
    for colour, (label, found) in zip(COLOURS, lines.items(), strict=False):
        for line in found:
            path = " ".join(f"{_x(a, right):.1f},{_y(b, high):.1f}" for a, b in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(f'<rect x="{at}" y="10" width="16" height="4" fill="{colour}"/>')
        parts.append(f'<text class="name" x="{at + 22}" y="16">{label}</text>')
        at += 60 + 7 * len(label)
    _write(name, parts, f"{y[1]} over {x[1]}", HEIGHT)


def _points(run: Path, x: str, y: str) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [(line[x], line[y]) for line in lines if line.get(x) is not None and line.get(y) is not None]
    begin = found[0][0] if x == "time_s" else 0.0
    return [(at - begin, value) for at, value in found]


def bars(name: str, page: str, title: str) -> None:
    """Draw success before and after, with intervals, from the page's table of results."""
    rows, recipe = [], ""
    for first, second, *numbers in RESULT.findall((DOCS / page).read_text(encoding="utf-8")):
        recipe = first.strip(" `").removeprefix("polyrhythm train ").replace("`", "") or recipe
        label = f"{recipe}, seed {second.strip()}" if second else recipe
        rows.append((label, [float(number) for number in numbers]))
    height, left = 46 + 30 * len(rows), 330
    scale = (WIDTH - left - 20) / 100
    parts = [f'<text class="name" x="10" y="18">{title}</text>']
    for tick in range(0, 101, 25):
        at = left + scale * tick
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="28" y2="{height - 18}"/>')
        parts.append(f'<text x="{at}" y="{height - 4}" text-anchor="middle">{tick}%</text>')
    for row, (label, numbers) in enumerate(rows):
        y = 44 + 30 * row
        parts.append(f'<text class="name" x="{left - 10}" y="{y + 5}" text-anchor="end">{label}</text>')
        for colour, shift, (rate, low, high) in ((COLOURS[1], -5, numbers[:3]), (COLOURS[0], 5, numbers[3:])):
            ends = f'x1="{left + scale * low}" x2="{left + scale * high}"'
            parts.append(f'<line {ends} y1="{y + shift}" y2="{y + shift}" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<circle cx="{left + scale * rate}" cy="{y + shift}" r="4" fill="{colour}"/>')
    key = "before (red) and after (blue)"
    parts.append(f'<text x="{WIDTH - 10}" y="18" text-anchor="end">{key}</text>')
    _write(name, parts, title, height)


def memory() -> None:
    """Draw the memory of a trainer by what is trained, from the tables of the policies' pages."""
    rows = []
    for page, names in {"pi0": ("π0", "π0.5"), "openvla_oft": ("OpenVLA-OFT",), "groot_n1d5": ("GR00T N1.5",)}.items():
        found = MEMORY.findall((DOCS / "policies" / f"{page}.md").read_text(encoding="utf-8"))
        rows += [(name, [float(number) for number in row.split(" | ")]) for name, row in zip(names, found, strict=True)]
    parts, left, scale = ['<text class="name" x="10" y="18">GB of a trainer, without activations</text>'], 130, 3.6
    height = 56 + 46 * len(rows)
    for tick in range(0, 121, 20):
        at = left + scale * tick
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="28" y2="{height - 18}"/>')
        parts.append(f'<text x="{at}" y="{height - 4}" text-anchor="middle">{tick}</text>')
    for number, (name, (_, *parted)) in enumerate(rows):
        y = 34 + 46 * number
        parts.append(f'<text class="name" x="{left - 10}" y="{y + 22}" text-anchor="end">{name}</text>')
        for place, (label, colour, value) in enumerate(zip(TRAINED, COLOURS, parted, strict=False)):
            width = scale * value
            parts.append(f'<rect x="{left}" y="{y + 13 * place}" width="{width:.1f}" height="11" fill="{colour}"/>')
            parts.append(f'<text x="{left + width + 4:.1f}" y="{y + 13 * place + 10}">{label} {value:g}</text>')
    _write("memory", parts, "Memory of a trainer by what is trained", height)


def _round(value: float) -> float:
    """The next larger number of one or two digits that has quarters."""
    unit = 10.0 ** (len(str(int(value))) - 1) / 5
    return math.ceil(value / unit) * unit


def _x(value: float, right: float) -> float:
    return LEFT + value / right * (WIDTH - LEFT - 16)


def _y(value: float, high: float) -> float:
    return HEIGHT - BOTTOM - value / high * (HEIGHT - TOP - BOTTOM)


def _axes(right: float, high: float, x: str, y: str) -> list[str]:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        at = _y(share * high, high)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 16}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{share * high:,.0f}</text>')
        anchor, across = "end" if share == 1 else "middle", _x(share * right, right)
        parts.append(f'<text x="{across}" y="{HEIGHT - 24}" text-anchor="{anchor}">{share * right:,.0f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{x}</text>')
    parts.append(
        f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})" text-anchor="middle">{y}</text>'
    )
    return parts


def _write(name: str, parts: Sequence[str], title: str, height: float) -> None:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">'
    FIGURES.mkdir(exist_ok=True)
    (FIGURES / f"{name}.svg").write_text("\n".join([svg, f"<style>{STYLE}</style>", *parts, "</svg>\n"]))


if __name__ == "__main__":
    main()
