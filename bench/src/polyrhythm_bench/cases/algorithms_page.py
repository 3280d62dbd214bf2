"""Writes the page and the plots from the result of `polyrhythm bench algorithms --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from polyrhythm_bench.harness.curves import mean_curve, placed
from polyrhythm_bench.harness.markdown import wrap_prose
from polyrhythm_bench.svg import Plot, picture, standing_alone

PAGE = "algorithms.md"
#: Colour and dash of each objective's line: blue clips, orange weighs, grey does neither, green corrects the values.
_LINES = {
    "ppo_behavior": ("#8fbbe0", "2 3"),
    "ppo": ("#4f94cd", "7 4"),
    "clip_higher": ("#4f94cd", "2 3"),
    "dual_clip": ("#4f94cd", "10 3 2 3"),
    "decoupled_ppo": ("#0b4f8a", ""),
    "decoupled_interpolate": ("#0b4f8a", "7 4"),
    "gspo": ("#7a4fb0", ""),
    "vanilla": ("#8a8f96", ""),
    "tis": ("#c2570c", ""),
    "cispo": ("#c2570c", "7 4"),
    "topr": ("#d99000", ""),
    "weighted_topr": ("#d99000", "7 4"),
    "v_trace": ("#1b7f5a", ""),
    "gipo": ("#a02c5d", ""),
    "gipo_half": ("#a02c5d", "7 4"),
    "grpo": ("#4f94cd", ""),
    "rloo": ("#c2570c", "7 4"),
    "maxrl": ("#1b7f5a", ""),
    "flow_noise": ("#4f94cd", ""),
    "flow_sde": ("#c2570c", "7 4"),
    "flow_cps": ("#1b7f5a", ""),
    "flow_cps_most": ("#1b7f5a", "2 3"),
}
_OTHER = ("#1c2126", "2 3")
_PANEL = (340, 260)
_STYLE = "".join(
    [
        "text{font:12px system-ui,sans-serif;fill:#1c2126}.tick,.name{fill:#59636e}.end{text-anchor:end}",
        ".middle{text-anchor:middle}.grid{stroke:#d5dae0}.axis{stroke:#59636e;fill:none}",
        ".line{fill:none;stroke-width:1.8;stroke-linejoin:round}",
    ]
)
_HEAD = """# Objectives under growing staleness

By `polyrhythm bench algorithms --json` and `python bench/scripts/algorithms_table.py`, {date}. What the objectives are:
[docs/objectives.md](../../docs/objectives.md). α = 0 is lock-step; otherwise rollout never waits for training, and the
mean lag (last line) is near α.
"""
_TASK = """
## {name}

Recipe {recipe} with `{settings}`: {samples} episodes a run, {seeds} seeds. A cell is the area under the learning
curve, the mean return over all episodes in the order of their tickets, and in brackets its ratio to the best objective
at the same α with a paired bootstrap 95% interval. **Bold**: the interval reaches the best, so these seeds do not tell
the two apart. Runs that halted (a gradient that is not finite) count 0 from there on{halted}.

| |{alphas} |
|---|{columns}
{rows}
| lag, mean |{lags} |

{choose}

![Mean learning curves over the seeds, a panel for each α]({figure})

Area by seed:

| objective | α | {seed_names} |
|---|---|{seed_columns}
{by_seed}
"""


def write(parts: Mapping[str, Mapping[str, Any]], out: Path) -> list[Path]:
    """Write the page and the plots of these tasks' results; return the paths written. out: a folder, or the page."""
    written = [out if out.suffix == ".md" else out / PAGE]
    text = [_HEAD.format(date=datetime.now(UTC).date().isoformat())]
    for name, part in parts.items():
        written.append(written[0].with_name(f"{written[0].stem}_{name}.svg"))
        written[-1].write_text(figure(name, part), encoding="utf-8")
        text.append(task_text(name, part, written[-1].name))
    written[0].write_text(wrap_prose("".join(text)), encoding="utf-8")
    return written


def task_text(name: str, part: Mapping[str, Any], figure_name: str) -> str:
    """Markdown of one task."""
    cells = {(cell["objective"], cell["alpha"]): cell for cell in part["cells"]}
    objectives, alphas = _each(part["cells"], "objective"), _each(part["cells"], "alpha")
    halted = {
        f"{objective} at α = {alpha}": own["halted"] for (objective, alpha), own in cells.items() if own["halted"]
    }
    lags = [fmean(cells[objective, alpha]["lag_mean"] for objective in objectives) for alpha in alphas]
    by_seed = [
        f"| {objective} | {alpha} | {' | '.join(f'{area:.3g}' for area in own['areas'])} |"
        for (objective, alpha), own in cells.items()
    ]
    return _TASK.format(
        name=name,
        recipe=part["recipe"],
        settings=" ".join(part["settings"]),
        samples=part["samples"],
        seeds=len(part["seeds"]),
        halted=": " + ", ".join(f"{where} {count}" for where, count in halted.items()) if halted else "; none did",
        alphas=" |".join(f" α = {alpha}" for alpha in alphas),
        columns="---|" * len(alphas),
        rows="\n".join(
            f"| {objective} | {' | '.join(_cell(cells[objective, alpha]) for alpha in alphas)} |"
            for objective in objectives
        ),
        lags=" |".join(f" {lag:.2f}" for lag in lags),
        choose=choose_text(part["choose"]),
        figure=figure_name,
        seed_names=" | ".join(f"seed {seed}" for seed in part["seeds"]),
        seed_columns="---|" * len(part["seeds"]),
        by_seed="\n".join(by_seed),
    )


def choose_text(choose: Mapping[str, Sequence[str]]) -> str:
    """Markdown table by α of the objectives that are statistically indistinguishable from the best."""
    lines = [f"| {alpha} | {', '.join(choose[alpha])} |" for alpha in sorted(choose, key=int)]
    return "\n".join(["| α | as good as the best, as far as these seeds tell |", "|---|---|", *lines])


def _cell(cell: Mapping[str, Any]) -> str:
    text = f"{cell['area']:.3g} ({cell['of_best']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}])"
    return f"**{text}**" if cell["high"] >= 1.0 else text


def _each(cells: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(cell[key] for cell in cells))


def figure(name: str, part: Mapping[str, Any]) -> str:
    """An SVG file: a panel for each α with every objective's mean curve, and a legend."""
    cells, samples, window = part["cells"], part["samples"], part["window"]
    objectives, alphas = _each(cells, "objective"), _each(cells, "alpha")
    highest = max(value for cell in cells for points in cell["curves"] for value in points)
    lowest = min(value for cell in cells for points in cell["curves"] for value in points)
    columns = 3
    width, height = _PANEL
    panels = []
    for number, alpha in enumerate(alphas):
        plot = Plot(f"α = {alpha}", (0, samples), (min(0.0, lowest), 1.02 * highest), size=_PANEL)
        plot.axes(f"α = {alpha}: episodes", f"{name}: mean return")
        for cell in cells:
            if cell["alpha"] == alpha:
                points = placed(mean_curve(cell["curves"]), samples, window)
                plot.line(points, f"o{objectives.index(cell['objective'])}")
        panels.append(_inside(plot.text, number % columns * width, number // columns * height))
    legend = _legend(objectives)
    panels.append(_inside(legend, len(alphas) % columns * width, len(alphas) // columns * height))
    size = columns * width, (len(alphas) // columns + 1) * height
    total = picture(f"{name}: learning curves by α", *size, panels)
    styles = _STYLE + "".join(
        f".o{number}{{stroke:{colour};stroke-dasharray:{dash or 'none'}}}"
        for number, (colour, dash) in enumerate(_LINES.get(objective, _OTHER) for objective in objectives)
    )
    return standing_alone(total, styles, *size)


def _legend(objectives: Sequence[str]) -> str:
    lines = []
    for number, objective in enumerate(objectives):
        y = 20 + 18 * number
        lines.append(f'<path class="line o{number}" d="M60,{y}H110"/><text x="118" y="{y + 4}">{objective}</text>')
    return picture("legend", *_PANEL, lines)


def _inside(svg: str, x: int, y: int) -> str:
    """The SVG as a nested element of another at x, y."""
    width, height = _PANEL
    return svg.replace("<svg ", f'<svg x="{x}" y="{y}" width="{width}" height="{height}" ', 1)
