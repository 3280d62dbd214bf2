"""Formats a comparison (`seeds.comparison`) as tables and as sections of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyrhythm.observe.intervals import percent
from polyrhythm.plugins.report.parts import AXES, Part, Scale, chart, series, table, text
from polyrhythm.plugins.report.read import Run
from polyrhythm.plugins.report.seeds import METRICS, comparison

Table = tuple[list[str], list[list[str]]]

#: Results of summary.json and their headings.
_RESULTS = {
    "before": "before",
    "after": "after",
    "before_sampled": "before, sampled",
    "after_sampled": "after, sampled",
    "swapped": "swapped",
}
#: Settings that name the environment.
_ENVIRONMENT = ("env.type", "env.id", "env.tasks")
_WAYS = ("greedy", "sampled", "swapped")


def groups_table(found: Mapping[str, Any]) -> Table:
    """Head and rows: a group each, with its results over seeds."""
    groups = found["groups"]
    names = [name for name in _RESULTS if any(name in group["results"] for group in groups)]
    head = ["runs", "seeds", *(_RESULTS[name] for name in names), "transitions/s", "minutes"]
    rows = []
    for group in groups:
        results = [_result(group["results"].get(name)) for name in names]
        numbers = [
            _spread(group["numbers"].get(name), scale) for name, scale in (("transitions_per_s", 1), ("wall_s", 60))
        ]
        rows.append([group["label"], ", ".join(group["seeds"]), *results, *numbers])
    return head, rows


def settings_table(found: Mapping[str, Any]) -> Table:
    """Head and rows: a setting each that differs, with its value in each row of `groups_table`."""
    rows = [f"row {number}" for number in range(1, len(found["groups"]) + 1)]
    return ["setting", *rows], [[path, *values] for path, values in found["settings"].items()]


def notes(found: Mapping[str, Any]) -> list[str]:
    """Sentences on what the table cannot say: of other environments, seeds that are there twice, unfinished runs."""
    sentences = []
    differing = {path: found["settings"][path] for path in _ENVIRONMENT if path in found["settings"]}
    if differing:
        names = "; ".join(f"{path} {', '.join(dict.fromkeys(values))}" for path, values in differing.items())
        sentences.append(f"Different environments ({names}): their results cannot be compared.")
    for group in found["groups"]:
        twice = [seed for seed, count in Counter(group["seeds"]).items() if count > 1]
        if twice:
            seeds = f"seed {', '.join(twice)}"
            sentences.append(
                f"{group['label']}: {seeds} is in several runs; the interval takes them for different seeds."
            )
        if group["unfinished"]:
            sentences.append(f"{group['label']}: not finished: {', '.join(group['unfinished'])}.")
    return sentences


def _result(result: Mapping[str, Any] | None) -> str:
    """`81% [70, 92]`; the return without reported success."""
    if result is None:
        return "–"
    if (success := result.get("success")) is None:
        return _spread(result["return"])
    return f"{percent(success['mean'])}% [{100 * success['low']:.0f}, {100 * success['high']:.0f}]"


def _spread(found: Mapping[str, Any] | None, scale: float = 1.0) -> str:
    """`1,393 [313, 2,473]`; the mean alone of one seed."""
    if found is None:
        return "–"
    mean, low, high = (None if found[name] is None else found[name] / scale for name in ("mean", "low", "high"))
    return _short(mean) if low is None or high is None else f"{_short(mean)} [{_short(low)}, {_short(high)}]"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# ------------------------------------------------------------ sections of the page


def draw_groups(runs: Sequence[Run]) -> list[Part]:
    """Results by group of seeds, of several runs."""
    if len(runs) < 2:
        return []
    found = comparison(runs, curves=False)
    caption = (
        "Success on held-out seeds (the return where success is not reported), speed and time: the mean over seeds "
        "with Student's 95% interval over them; that of success is never narrower than Wilson's of all episodes. A "
        "single run has Wilson's."
    )
    return [table(*groups_table(found), caption), *(text(sentence, "notice") for sentence in notes(found))]


def draw_settings(runs: Sequence[Run]) -> list[Part]:
    """Settings that differ between groups."""
    head, rows = settings_table(comparison(runs, curves=False)) if len(runs) > 1 else ([], [])
    return [table(head, rows, "The runs are the same in all other settings but the seed.")] if rows else []


def draw_curves(runs: Sequence[Run]) -> list[Part]:
    """Curves over seeds: success (or return) over transitions and over time, then metrics of updates."""
    if len(runs) < 2:
        return []
    groups = comparison(runs)["groups"]
    measured = any("success" in group["curves"]["transitions"] for group in groups)
    parts = [
        text(
            "Lines: the mean over the seeds of a group, with Student's 95% interval over seeds; a single run has no "
            "interval. Points: evaluations on held-out seeds. The axes fit the lines and points, so a wide interval is "
            "cut. Explained variance below -1 is drawn at -1.",
            "soft",
        )
    ]
    name, scale = (
        ("success", Scale("success", 0.0, 1.0, percent=True)) if measured else ("return", Scale("mean return"))
    )
    parts += [_chart(groups, name, axis, scale, evaluations=True) for axis in AXES]
    for metric, (label, _) in METRICS.items():
        if any(metric in group["curves"]["transitions"] for group in groups):
            parts.append(_chart(groups, metric, "transitions", Scale(label)))
    return parts


def _chart(
    groups: Sequence[Mapping[str, Any]], name: str, axis: str, scale: Scale, *, evaluations: bool = False
) -> Part:
    curves = [one for number, group in enumerate(groups) for one in _curves(group, number, name, axis)]
    ways = [way for way in _WAYS if any(f"evaluation/{way}/{name}" in group["curves"][axis] for group in groups)]
    for way in ways[:1] if evaluations else ():  # the table has the others
        for number, group in enumerate(groups):
            own = group["curves"][axis].get(f"evaluation/{way}/{name}")
            if own is not None:
                curves += _series(own, f"{group['label']}: evaluation, {way}", number, axis, style="points")
    title = f"{scale.label[0].upper()}{scale.label[1:]} over {axis}"
    return chart(f"seeds-{name}-{axis}", title, scale, curves, x={axis: AXES[axis]})


def _curves(group: Mapping[str, Any], number: int, name: str, axis: str) -> Iterator[Part]:
    own = group["curves"][axis].get(name)
    if own is not None:
        count = f", {len(own['each'])} seeds" if len(own["each"]) > 1 else ""
        yield from _series(own, f"{group['label']}{count}", number, axis, style="line")


def _series(own: Mapping[str, Any], label: str, number: int, axis: str, *, style: str) -> list[Part]:
    """The mean with its interval; the curves themselves if there is only one, or no common range."""
    if own["x"]:
        found = {axis: own["x"]}
        return [series(label, number, found, own["mean"], style=style, low=own["low"], high=own["high"])]
    return [series(label, number, {axis: one["x"]}, one["y"], style=style) for one in own["each"]]
