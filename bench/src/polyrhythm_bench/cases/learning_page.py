"""Writes the page and the plots from the result of `polyrhythm bench learning --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyrhythm_bench.harness.curves import mean_curve, placed
from polyrhythm_bench.harness.markdown import wrap_prose
from polyrhythm_bench.svg import Plot, standing_alone

PAGE = "learning.md"
_COLOURS = ("#1f6fb4", "#c2570c", "#1b7f5a")
_STYLE = "".join(
    [
        "text{font:13px system-ui,sans-serif;fill:#1c2126}.tick,.name{fill:#59636e}.end{text-anchor:end}",
        ".middle{text-anchor:middle}.grid{stroke:#d5dae0}.axis{stroke:#59636e;fill:none}",
        ".line{fill:none;stroke-width:2.5;stroke-linejoin:round}.one{stroke-width:1;opacity:.3}",
        ".d1{stroke-dasharray:7 4}.d2{stroke-dasharray:2 3}.one{stroke-dasharray:none}",
        *(f".line.s{n}{{stroke:{colour}}}text.s{n}{{fill:{colour}}}" for n, colour in enumerate(_COLOURS)),
    ]
)
_HEAD = """# Learning, in lock-step and asynchronously

By `polyrhythm bench learning --json` and `python bench/scripts/learning_table.py`, {date}. Every seed is here.
"""
_CURVES = """
## {name}

Recipe {recipe} with `{settings}`: {samples} episodes a run. The curve is the mean return of training episodes in
windows of {window} tickets, in the order of the tickets; the area under it is the mean return over all of them. Ratios
are of the mean areas over {seeds} seeds, with a paired bootstrap 95% interval.

![Thin lines are seeds, thick ones their means]({figure})

| | area | ratio to {first} | success | last window | lag, mean |
|---|---|---|---|---|---|
{modes}

| seed | {names} |
|---|{columns}
{rows}
"""
_CLOCK = """
## Time to the same success

CartPole with `{settings}`, real processes, one run after the other. Sleeping: {step_ms:g} ms for each step of an env
batch, {act_ms:g} ms for each forward pass; training took {share:.0f}% of the lock-step rollout. Success is a mean
return of {goal:g} over the last {episodes} training episodes that ended. Seconds are medians over the seeds, what
follows them means.

| | seconds | times faster (by seed) | versions | episodes | lag, mean |
|---|---|---|---|---|---|
{modes}

| seed | {names} |
|---|{columns}
{rows}
"""


def write(parts: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the page and the plots of these parts of results into `folder`; return the paths written."""
    page = folder / PAGE
    text = [_HEAD.format(date=datetime.now(UTC).date().isoformat())]
    written = [page]
    for name, part in parts.items():
        if name == "wall_clock":
            text.append(clock_table(part))
            continue
        written.append(folder / f"learning_{name}.svg")
        written[-1].write_text(figure(name, part), encoding="utf-8")
        text.append(curve_table(name, part, written[-1].name))
    page.write_text(wrap_prose("".join(text)), encoding="utf-8")
    return written


def curve_table(name: str, part: Mapping[str, Any], figure: str) -> str:
    """Markdown of one task: a table of the modes, and a table of every seed's area."""
    modes = part["modes"]
    measured = any(own["success"] for own in modes.values())
    lines = []
    for mode, own in modes.items():
        ratio = f"{own['ratio']:.3f} [{own['low']:.3f}, {own['high']:.3f}]" if "ratio" in own else "1"
        success = f"{100 * own['success']:.0f}%" if measured else "not measured"
        lines.append(_row([mode, f"{own['area']:.2f}", ratio, success, f"{own['last']:.1f}", f"{own['lag_mean']:.2f}"]))
    areas = {mode: own["areas"] for mode, own in modes.items()}
    return _CURVES.format(
        name=name,
        recipe=part["recipe"],
        settings=" ".join(part["settings"]),
        samples=part["samples"],
        window=part["window"],
        seeds=len(part["seeds"]),
        figure=figure,
        first=next(iter(modes)),
        modes="\n".join(lines),
        **_by_seed(part["seeds"], areas, "area", inverse=False),
    )


def clock_table(part: Mapping[str, Any]) -> str:
    """Markdown of the time to the same success, by mode and by seed."""
    lines = []
    for mode, own in part["modes"].items():
        turns = ", ".join(f"{value:.2f}" for value in own["speedup_by_seed"])
        cells = [mode, f"{own['seconds']:.1f}", f"{own['speedup']:.2f} ({turns})"]
        lines.append(_row([*cells, f"{own['versions']:.0f}", f"{own['ended']:.0f}", f"{own['lag_mean']:.2f}"]))
    seconds = {mode: own["seconds_by_seed"] for mode, own in part["modes"].items()}
    return _CLOCK.format(
        settings=" ".join(part["settings"]),
        share=100 * part["training_over_rollout"],
        modes="\n".join(lines),
        **{name: part[name] for name in ("step_ms", "act_ms", "goal", "episodes")},
        **_by_seed(part["seeds"], seconds, "seconds", inverse=True),
    )


def _by_seed(
    seeds: Sequence[int], values: Mapping[str, Sequence[float]], what: str, *, inverse: bool
) -> dict[str, str]:
    """names, columns, rows of a table by seed: each mode's value, and in brackets its ratio to the first mode's."""
    first, *others = values
    rows = []
    for place, seed in enumerate(seeds):
        base = values[first][place]
        cells = [str(seed), f"{base:.2f}"]
        for mode in others:
            own = values[mode][place]
            cells.append(f"{own:.2f} ({base / own if inverse else own / base:.3f})")
        rows.append(_row(cells))
    return {
        "names": " | ".join(f"{mode}, {what}" for mode in values),
        "columns": "---|" * len(values),
        "rows": "\n".join(rows),
    }


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figure(name: str, part: Mapping[str, Any]) -> str:
    """An SVG file: thin curves of all seeds and their thick mean, one colour and dash per mode."""
    modes, samples, window = part["modes"], part["samples"], part["window"]
    highest = max(value for own in modes.values() for points in own["curves"] for value in points)
    lowest = min(value for own in modes.values() for points in own["curves"] for value in points)
    plot = Plot(f"{name}: return of training episodes", (0, samples), (min(0.0, lowest), 1.05 * highest), right=24)
    plot.axes("training episodes, by ticket", f"{name}: mean return")
    for number, own in enumerate(modes.values()):
        for points in own["curves"]:
            plot.line(placed(points, samples, window), f"s{number} one")
    for number, (mode, own) in enumerate(modes.items()):
        plot.line(placed(mean_curve(own["curves"]), samples, window), f"s{number} d{number}")
        plot.label(plot.width - 130, plot.height - 110 + 20 * number, mode, f"s{number}")
    return standing_alone(plot.text, _STYLE, plot.width, plot.height)
