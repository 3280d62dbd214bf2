"""Writes the page from the result of `polyrhythm bench envs --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyrhythm_bench.harness.markdown import wrap_prose

PAGE = "envs.md"
_HEAD = """# Environments as a simulator calls them

By `polyrhythm bench envs --steps {steps} --repeats {repeats} {options}--json > envs.json` and `python
bench/scripts/envs_table.py envs.json`, {date}; {cores} cores, load average {load_before:.1f} before it began.

Medians of {steps} steps with random actions, one row (cartpole_vector: four). *observe*: for images the rendering.
*ratio*, *over*: our step and observation over the step of the bare simulator, in turn with the same actions; the aim is
{limit_ratio} or {limit_us:.0f} µs, whichever allows more. *first row*: memory (PSS) of a process with one row; *each
further*: of four more.

| environment | step, ms | observe, ms | reset, ms | ratio | over, µs | first row, MB | each further, MB |
|---|---|---|---|---|---|---|---|
{rows}

## Percentiles, ms

*bare* has p50 of the bare simulator's step and reset.

| environment | step p50 / p95 / p99 | observe p50 / p95 / p99 | reset p50 / p95 / p99 | bare step | bare reset |
|---|---|---|---|---|---|
{percentiles}

## Env steps per second

With observations and resets, by rows of a batch × threads of a process, each with a batch × processes.

| environment | {cells} |
|---|{dashes}|
{throughput}
"""
_AHEAD = """
## Resets ahead

A slot of {rows} rows whose episodes of 50 steps begin together, {think_ms:.0f} ms of waiting after each step (for
actions that come from elsewhere); with a spare row for each and without, in turn, in one process. Both begin with the
same observations, bit for bit. *share*: reset and first observation in the slot's time.

| {name} | reset, s | first observation, s | whole turn, s | share |
|---|---|---|---|---|
{modes}

A whole turn takes {ratio:.2f} times as long as without: the resets take the same CPU time, beside the steps.
"""


def write(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the page into the folder; the path. found: the content of the JSON output."""
    details: Mapping[str, Any] = found["parts"]
    grid = next(iter(details.values()))["steps_per_s"]
    numbers = {key: found[key] for key in ("steps", "repeats", "cores", "load_before", "limit_ratio", "limit_us")}
    text = _HEAD.format(
        options=f"--pythons {','.join(f'{kind}=PYTHON' for kind in found['pythons'])} " if found["pythons"] else "",
        date=datetime.now(UTC).date(),
        rows="\n".join(_row(name, mode) for name, mode in found["modes"].items()),
        percentiles="\n".join(_percentiles(name, own["modes"]) for name, own in details.items()),
        cells=" | ".join(f"{cell['rows']} × {cell['threads']} × {cell['processes']}" for cell in grid),
        dashes="|".join("---" for _ in grid),
        throughput="\n".join(_rates(name, own["steps_per_s"]) for name, own in details.items()),
        **numbers,
    )
    for name, own in details.items():
        if "parts" in own:
            text += ahead_text(name, own["parts"]["resets ahead"])
    if found["left_out"]:
        text += "\n## Not run\n\n" + "\n".join(f"- {sentence}." for sentence in found["left_out"]) + "\n"
    path = folder / PAGE
    path.write_text(wrap_prose(text), encoding="utf-8")
    return [path]


def _row(name: str, mode: Mapping[str, Any]) -> str:
    bare = (f"**{mode['ratio']:.2f}**", f"{mode['over_us']:.0f}") if "ratio" in mode else ("", "")
    times = (_ms(mode[key]) for key in ("step_ms", "observe_ms", "reset_ms"))
    return _line(name, *times, *bare, f"{mode['mb']:.0f}", f"{mode['mb_per_row']:.1f}")


def _percentiles(name: str, times: Mapping[str, Mapping[str, float]]) -> str:
    own = (" / ".join(map(_ms, times[key].values())) for key in ("step", "observe", "reset"))
    return _line(name, *own, *(_ms(times[key]["p50"]) if key in times else "" for key in ("bare", "bare_reset")))


def _rates(name: str, cells: Sequence[Mapping[str, float]]) -> str:
    return _line(name, *(f"{cell['steps_per_s']:,.0f}" for cell in cells))


def ahead_text(name: str, found: Mapping[str, Any]) -> str:
    modes: Mapping[str, Mapping[str, float]] = found["modes"]
    lines = [
        _line(
            way,
            *(f"{mode[key]:.2f}" for key in ("reset_s", "first_observation_s", "turn_s")),
            f"{100 * mode['share']:.1f}%",
        )
        for way, mode in modes.items()
    ]
    ratio = modes["ahead"]["turn_s"] / modes["in place"]["turn_s"]
    return _AHEAD.format(rows=found["rows"], think_ms=found["think_ms"], name=name, modes="\n".join(lines), ratio=ratio)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
