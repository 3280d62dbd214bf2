"""Draws the charts of a report; each shows one run, or compares several, with a sentence of explanation.

With one run each series has its own colour; with several runs each run has its own colour and dash.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from polyrhythm.observe.activity import by_kind
from polyrhythm.plugins.report import svg
from polyrhythm.plugins.report.read import (
    Measured,
    Point,
    Run,
    change_places,
    fault_times,
    group_label,
    lag_points,
    over_seeds,
    pace_points,
    seed_groups,
    split_at_pauses,
    training_points,
)
from polyrhythm.plugins.report.svg import Plot, percent

_WAYS = ("greedy", "sampled", "swapped")
#: More stations than this are shown by kind; number of colours.
_STATIONS, _COLOURS = 8, 7
#: Height of a line of labels, and about the width of a character, in picture units.
_LINE, _CHAR = 15, 7.5
#: Size of one of two pictures side by side.
HALF = (450, 240)


class Figure(NamedTuple):
    """A section with charts. legend: (key, text), the key a small SVG; pictures: side by side if they fit."""

    heading: str
    sentence: str
    legend: list[tuple[str, str]]
    pictures: list[str]


def colour(number: int) -> str:
    return f"s{number % _COLOURS}"


def look(number: int) -> str:
    """CSS classes of a line's colour and dash."""
    return f"{colour(number)} d{number % 4}"


def line_key(kind: str) -> str:
    return f'<svg class="key" viewBox="0 0 26 12" aria-hidden="true"><path class="line {kind}" d="M1,6H25"/></svg>'


def mark_key(kind: str, mark: int) -> str:
    shape = f'<path class="mark {kind}" transform="translate(13,6)" d="{svg.MARKS[mark]}"/>'
    return f'<svg class="key" viewBox="0 0 26 12" aria-hidden="true">{shape}</svg>'


def area_key(kind: str) -> str:
    shape = svg.rectangle(5, 1, 16, 10, kind)
    return f'<svg class="key" viewBox="0 0 26 12" aria-hidden="true">{shape}</svg>'


def run_keys(runs: Sequence[Run]) -> list[tuple[str, str]]:
    return [(line_key(look(number)), run.label) for number, run in enumerate(runs)]


def mark_changes(plot: Plot, runs: Sequence[Run], over: str = "throughput/transitions", unit: float = 1.0) -> None:
    """Draw a vertical line at each change of settings after the first update."""
    for run in runs:
        for place in change_places(run, over):
            if place > 0:
                plot.upright(place / unit, "change")


def change_keys(runs: Sequence[Run]) -> list[tuple[str, str]]:
    changed = any(place > 0 for run in runs for place in change_places(run))
    return [(line_key("change"), "settings were changed")] if changed else []


# ---------------------------------------------------------------- success and return


def success(runs: Sequence[Run]) -> Figure | None:
    """Success: evaluations as points with intervals, training as a curve; None if success is not measured."""
    if not any(run.measures_success for run in runs):
        return None
    sentence = (
        "The curve is the success of training episodes, with noise; the points are evaluations on held-out seeds, each "
        "with its Wilson 95% interval."
    )
    return _over_transitions(runs, "Success", sentence, (0.0, 1.0), 340)


def returns(runs: Sequence[Run]) -> Figure | None:
    """Mean return, in the form of `success`."""
    earned = [y for run in runs for _, y in _training(run, measured=False)]
    earned += [evaluation.mean_return for run in runs for evaluation in run.evaluations]
    if not earned:
        return None
    high = max(earned) + 0.05 * abs(max(earned))
    measured = any(run.measures_success for run in runs)
    sentence = (
        f"{'' if measured else 'This environment reports no success. '}The curve is the mean return of training "
        "episodes, with noise; the points are evaluations on held-out seeds."
    )
    return _over_transitions(runs, "Mean return", sentence, (min(0.0, *earned), high), 240 if measured else 340)


def _training(run: Run, *, measured: bool) -> list[tuple[float, float]]:
    """The training curve of success (measured) or of returns."""
    return [(p.transitions, y) for p in training_points(run) if (y := _value(p, measured=measured)) is not None]


def _over_transitions(runs: Sequence[Run], what: str, sentence: str, y: tuple[float, float], height: int) -> Figure:
    """Training curves, changes of settings, and the evaluations; runs that differ only in their seed as a mean curve,
    with a band from the lowest to the highest seed."""
    measured = what == "Success"
    most = max((line.get("throughput/transitions") or 0.0 for run in runs for line in run.updates), default=1.0)
    right = 72 if len(runs) == 1 else 30  # with one run the labels of the last evaluation fit
    plot = Plot(f"{what} over transitions", (-0.02 * most, 1.02 * most), y, size=(920, height), right=right)
    y_format, x_ticks = percent if measured else svg.short, svg.ticks(0, most, 8)
    words = "transitions (env steps of finished training samples)"
    plot.axes(words, what.lower(), y_format=y_format, x_ticks=x_ticks)
    if (groups := seed_groups(runs)) is not None:
        sentence += " Runs that differ only in their seed share a colour: the mean over them, from the lowest to the "
        sentence += "highest."
        for number, group in groups.items():
            points = over_seeds([curve for run in group if (curve := _training(run, measured=measured))])
            if len(group) > 1:
                plot.band([(x, low, high) for x, _, low, high in points], colour(number))
            plot.line([(x, mean) for x, mean, _, _ in points], look(number))
    else:
        for number, run in enumerate(runs):
            if measured:
                rates = [(point.transitions, point.success) for point in training_points(run)]
                plot.band([(x, rate.low, rate.high) for x, rate in rates if rate is not None], colour(number))
            plot.line(_training(run, measured=measured), look(number) if len(runs) > 1 else "s0")
    mark_changes(plot, runs)
    _evaluations(plot, runs, measured=measured)
    return Figure(f"{what} over transitions", sentence, _success_keys(runs) + change_keys(runs), [plot.text])


def _ways(runs: Sequence[Run]) -> list[str]:
    return [way for way in _WAYS if any(e.way == way for run in runs for e in run.evaluations)]


def _evaluations(plot: Plot, runs: Sequence[Run], *, measured: bool) -> None:
    ways = _ways(runs)
    # The first run of each run's seed group; without seed groups, the run itself.
    groups = {id(run): place for place, group in (seed_groups(runs) or {}).items() for run in group}
    places = len(runs) * len(ways)
    for number, run in enumerate(runs):
        for evaluation in run.evaluations:
            way = ways.index(evaluation.way)
            aside = 9.0 * (number * len(ways) + way - (places - 1) / 2)
            kind = colour(groups.get(id(run), number) if len(runs) > 1 else way + 1)
            if measured and evaluation.success is not None:
                plot.interval(evaluation.transitions, *evaluation.success[1:], kind, aside=aside)
            if (y := _value(evaluation, measured=measured)) is not None:
                plot.point(evaluation.transitions, y, kind, way, aside=aside)
    if len(runs) == 1:
        _labels(plot, runs[0].evaluations, ways, measured=measured)


def _value(one: Measured | Point, *, measured: bool) -> float | None:
    """Its height in the figure of success (measured) or of returns; None if it has none."""
    if not measured:
        return one.mean_return
    return None if one.success is None else one.success.rate


def _labels(plot: Plot, evaluations: Sequence[Measured], ways: Sequence[str], *, measured: bool) -> None:
    """Label one run's points with their values: always the last and the first, others if they fit."""
    places = [evaluation.transitions for evaluation in evaluations]
    ends = [max(places, default=0.0), min(places, default=0.0)]
    ranked = sorted(evaluations, key=lambda one: ends.index(one.transitions) if one.transitions in ends else len(ends))
    shown = [(one, value) for one in ranked if (value := _value(one, measured=measured)) is not None]
    texts = [percent(value) if measured else svg.short(value) for _, value in shown]
    left = 9.0 * len(ways) / 2 + 8
    wanted = [
        svg.Label(plot.px(one.transitions) + left, plot.py(value), _CHAR * len(text) + _CHAR)
        for (one, value), text in zip(shown, texts, strict=True)
    ]
    heights = svg.place_labels(wanted, _LINE, 12, plot.height - 46, 3 * _LINE)
    for (evaluation, _), label, text, height in zip(shown, wanted, texts, heights, strict=True):
        if height is not None:
            plot.label(label.x, height + 4, text, f"value {colour(ways.index(evaluation.way) + 1)}")


def _success_keys(runs: Sequence[Run]) -> list[tuple[str, str]]:
    ways = _ways(runs)
    if (groups := seed_groups(runs)) is not None:
        keys = [(line_key(look(number)), group_label(group)) for number, group in groups.items()]
        return keys + [(mark_key("plain", number), way) for number, way in enumerate(ways)]
    if len(runs) > 1:
        return run_keys(runs) + [(mark_key("plain", number), way) for number, way in enumerate(ways)]
    marks = [(mark_key(colour(number + 1), number), f"evaluation, {way}") for number, way in enumerate(ways)]
    return [(line_key("s0"), "training episodes"), *marks]


# ---------------------------------------------------------------- throughput, utilisation, lag


def throughput(runs: Sequence[Run]) -> Figure | None:
    """Transitions per second over time, with faults marked."""
    curves = [pace_points(run) for run in runs]
    if not any(curves):
        return None
    points = [point for curve in curves for part in curve for point in part]
    times = [x for x, _ in points]
    unit, name = _unit(times)
    highest = max(y for _, y in points)
    plot = Plot("Transitions per second over time", (min(times) / unit, max(times) / unit), (0, 1.1 * highest))
    plot.axes(f"{name} since the run began", "transitions/s")
    lost = False
    for number, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        for part in curve:
            plot.line([(x / unit, y) for x, y in part], look(number))
        for time_s in fault_times(run):
            plot.upright(time_s / unit)
            lost = True
    mark_changes(plot, runs, "time_s", unit)
    keys = (run_keys(runs) if len(runs) > 1 else []) + change_keys(runs)
    if lost:
        keys.append((line_key("fault"), "a station was lost"))
    sentence = (
        "Env steps of the training samples that finished, each second; evaluations before and after are left out. A "
        "line is interrupted where no update ended for long: the run was resumed or evaluated there."
    )
    return Figure("Throughput", sentence, keys, [plot.text])


def _unit(times: Sequence[float]) -> tuple[float, str]:
    """Time unit of an axis: its seconds and its name."""
    return (60.0, "minutes") if max(times) > 180 else (1.0, "seconds")


def utilisation(runs: Sequence[Run]) -> Figure | None:
    """Utilisation of each station: bars for the whole training, and for one run also curves over time."""
    shares = [by_kind(run.summary.get("utilisation", {}), _STATIONS) for run in runs]
    stations = list(dict.fromkeys(name for own in shares for name in own))
    pictures = [share_bars(runs, shares, stations, "Utilisation of each station")] if stations else []
    keys: list[tuple[str, str]] = []
    if len(runs) == 1:
        names = sorted({name for line in runs[0].updates for name in line if name.startswith("stations/utilisation/")})
        order = {name: number for number, name in enumerate(stations)}
        names.sort(key=lambda name: order.get(name.rpartition("/")[2], len(order)))
        if names and len(names) <= _STATIONS:
            pictures.append(share_curves(runs[0], names))
            keys = [(line_key(look(number)), name.rpartition("/")[2]) for number, name in enumerate(names)]
    else:
        keys = [(area_key(colour(number)), run.label) for number, run in enumerate(runs)]
    if not pictures:
        return None
    sentence = (
        "The share of training in which each station was at work (bars), and of the last ten seconds (curves), "
        "waiting for a processor core included; the one near 100% sets the tempo, the others wait for it."
    )
    if len(runs) == 1 and "bottleneck" in runs[0].summary:
        sentence = f"{runs[0].summary['bottleneck']} {sentence}"
    if len(runs) > 1:
        sentence = (
            "The share of training in which each station was at work, waiting for a processor core included; the one "
            "near 100% sets the tempo."
        )
    return Figure("Utilisation", sentence, keys, pictures)


def share_bars(runs: Sequence[Run], shares: Sequence[dict[str, float]], stations: Sequence[str], title: str) -> str:
    """A bar for each station (or other share) and run. shares: by run and name."""
    single = len(runs) == 1
    width, left = (450, 145) if single else (920, 150)
    thick, gap = (18, 14) if single else (13, 12)
    parts, y = [], 8.0
    for number, station in enumerate(stations):
        height = len(runs) * thick
        parts.append(f'<text class="end" x="{left - 8}" y="{y + height / 2 + 4:.1f}">{escape(station)}</text>')
        for place, own in enumerate(shares):
            share = own.get(station)
            if share is not None:
                long = share * (width - left - 60)
                parts.append(svg.rectangle(left, y, long, thick - 2, colour(number if single else place)))
                parts.append(f'<text x="{left + long + 6:.1f}" y="{y + thick - 5:.1f}">{percent(share)}</text>')
            y += thick
        y += gap
    return svg.picture(title, width, y, parts)


def share_curves(run: Run, names: Sequence[str]) -> str:
    """Curves of these metrics over time, between 0 and 1."""
    series = [run.series(name, over="time_s") for name in names]
    times = [x for curve in series for x, _ in curve]
    unit, words = _unit(times)
    plot = Plot("Utilisation over time", (min(times) / unit, max(times) / unit), (0, 1), size=HALF)
    plot.axes(f"{words} since the run began", "share at work", y_format=percent)
    for number, curve in enumerate(series):
        for part in split_at_pauses(curve):
            plot.line([(x / unit, y) for x, y in part[:: max(1, len(curve) // 150)]], look(number))
    return plot.text


def lag(runs: Sequence[Run]) -> Figure | None:
    """Lag of trained samples: a histogram, and curves over transitions."""
    counts = [{int(k): v for k, v in run.summary.get("lag", {}).get("counts", {}).items()} for run in runs]
    pictures = [_histogram(counts, single=len(runs) == 1)] if any(counts) else []
    curves = [lag_points(run) for run in runs]
    if any(curves):
        pictures.append(_lags(curves))
    if not pictures:
        return None
    keys = [(line_key("s0"), "mean"), (line_key("s1 d1"), "largest")] if len(runs) == 1 else run_keys(runs)
    stated = [run.summary["lag"] for run in runs if "lag" in run.summary]
    numbers = f" Mean {stated[0]['mean']:.2f}, largest {stated[0]['max']}." if len(runs) == 1 and stated else ""
    sentence = (
        f"The trainer's version minus the oldest version of the weights in a sample, when the trainer got it.{numbers}"
    )
    return Figure("Lag", sentence, keys, pictures)


def _histogram(counts: Sequence[dict[int, int]], *, single: bool) -> str:
    largest = max(lag for own in counts for lag in own)
    plot = Plot("Samples by lag", (-0.6, largest + 0.6), (0, 1.08), size=HALF)
    whole = range(0, largest + 1, max(1, (largest + 1) // 10))
    plot.axes("lag in versions", "share of samples", y_format=percent, x_ticks=list(whole))
    width = min(60.0, 300.0 / (largest + 1)) / len(counts)
    for number, own in enumerate(counts):
        total = sum(own.values())
        for versions, count in own.items():
            aside = width * (number - (len(counts) - 1) / 2)
            plot.column(versions, width - 2, count / total, colour(number), aside=aside)
            if single and _CHAR * len(f"{count:,}") < plot.px(1) - plot.px(0):
                plot.label(plot.px(versions), plot.py(count / total) - 4, f"{count:,}", "tick middle")
    return plot.text


def _lags(curves: Sequence[list[tuple[float, float, float]]]) -> str:
    """Lag curves: mean and maximum with one run, means with several."""
    points = [point for curve in curves for point in curve]
    high = max(1.0, *(largest for _, _, largest in points))
    plot = Plot("Lag over transitions", (0, max(x for x, _, _ in points)), (0, 1.1 * high), size=HALF)
    plot.axes("transitions", "lag in versions", y_ticks=[y for y in svg.ticks(0, high) if y == int(y)])
    for number, curve in enumerate(curves):
        if len(curves) == 1:
            plot.stairs([(x, largest) for x, _, largest in curve], "s1 d1")
        plot.line([(x, mean) for x, mean, _ in curve], look(number))
    return plot.text
