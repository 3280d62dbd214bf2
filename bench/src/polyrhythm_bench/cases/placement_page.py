"""Writes the page from the parts of `polyrhythm bench placement --json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyrhythm_bench.cases.placement import LIMIT
from polyrhythm_bench.harness.markdown import wrap_prose

PAGE = "placement.md"
_HEAD = """# Placements on devices that are locks

By `polyrhythm bench placement --json > placement.json` and `python bench/scripts/placement_table.py placement.json`,
{date}, on two cores, of which other work took {others:.1f} (median of the cells; the most in one turn: {most:.1f}).

Processes that sleep, beside the simulated cluster. A device is a lock: a pass of a generator, a chunk step of an env
batch that simulates on the device, and a rank's part of a gradient step hold it, one at a time, in the order of asking.
Switching costs nothing and nothing takes memory. The simulated cluster has the same rule (`sharing: exclusive`). Stage
times are those of [papers.md](papers.md#stage-times), scaled: 4 devices for 8, seconds by the factor given below,
episodes of 4 chunk steps. Under locks they are not the paper's cluster, which [papers.md](papers.md) compares: env
batches step at once in lock-step too, whoever simulates on a device holds it, samples are handed over at once, and
asynchronous rollout may be two versions ahead. What this page shows is that live processes and the simulated cluster
agree. No disaggregated row is published for these setups; ours is the colocated one with its env batches on half of the
devices and the trainer on the others.

- Rates are transitions per second, scaled back to the published size.
- *live / simulated*: the medians' ratio, and that of each turn. The bar is {limit:.0%} either way: **{verdict}** (the
  largest difference is {largest:.1%}). Nothing is added to the simulated stages for what live ones take longer.
- *held*: mean share of the time in which a device is held.
- *turns*: on the devices, in all live runs together; *late*: turns after which one began that had asked earlier (the
  clock is read just before joining the line, so stations that come at about the same time may look so); *shared*: that
  began before the previous one had ended; *handover*: from the end of a turn to the beginning of the next that waits.
"""
_CELLS = (
    "placement",
    "mode",
    "published",
    "simulated",
    "live",
    "live / simulated",
    "held, live / simulated",
    "s counted",
    "turns",
    "late, shared",
    "handover, ms",
)
_EXPLANATION = """
## Where the order differs from the paper's

{differences}
"""


def write(parts: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the page into the folder; the path. parts: those of the JSON output."""
    cells = [cell for part in parts.values() for cell in part["cells"]]
    largest = max(abs(cell["live_to_simulated"] - 1) for cell in cells)
    others = sorted(cell["others_cores"] for cell in cells)
    text = _HEAD.format(
        date=datetime.now(UTC).date(),
        others=others[len(others) // 2],
        most=others[-1],
        limit=LIMIT,
        verdict="all cells are within it" if largest <= LIMIT else f"{_count_beyond(cells)} of {len(cells)} are beyond",
        largest=largest,
    )
    for name, part in parts.items():
        text += "\n".join(_part(name, part))
    text += _EXPLANATION.format(differences="\n".join(_differences(parts)))
    path = folder / PAGE
    path.write_text(wrap_prose(text), encoding="utf-8")
    return [path]


def _count_beyond(cells: Sequence[Mapping[str, Any]]) -> int:
    return sum(abs(cell["live_to_simulated"] - 1) > LIMIT for cell in cells)


def _part(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    times = part["times"]
    published = [cell for cell in part["cells"] if cell["published"] is not None]
    yield (
        f"\n## {name}\n\nOf a row: a chunk step {1000 * times['step']:.3g} ms, a pass {1000 * times['generate']:.3g} "
        f"ms, training {1000 * times['train']:.3g} ms; seconds times {part['scale']:.4g}.\n"
    )
    yield from _table(_CELLS, [_cell(cell) for cell in part["cells"]])
    yield ""
    rows = [
        [row["mode"], *(_chain(row[by]) for by in ("published", "simulated", "live")), _word(row)]
        for row in part["rankings"]
    ]
    orders = [[_label(cell) for cell in _fastest_first(published, by)] for by in ("published", "live")]
    if len(published) > 1:
        same = "yes" if orders[0] == orders[1] else "no"
        rows.append(["both, published cells", _chain(orders[0]), "", _chain(orders[1]), same])
    head = ("fast to slow", "published", "simulated", "live", "as published")
    yield from _table(head, rows)
    yield ""


def _cell(cell: Mapping[str, Any]) -> list[str]:
    turns = ", ".join(f"{ratio:.3f}" for ratio in cell["ratios_by_turn"])
    mark = "**" if abs(cell["live_to_simulated"] - 1) > LIMIT else ""
    return [
        cell["placement"],
        cell["mode"],
        _published(cell),
        f"{cell['simulated']:.1f}",
        f"{cell['live']:.1f}",
        f"{mark}{cell['live_to_simulated']:.3f}{mark} ({turns})",
        f"{cell['busy']:.2f} / {cell['busy_simulated']:.2f}",
        f"{cell['seconds']:.1f}",
        f"{cell['turns']:,}",
        f"{cell['out_of_order']}, {cell['overlapping']}",
        f"{cell['handover_ms']:.2f}",
    ]


def _published(cell: Mapping[str, Any]) -> str:
    return "" if cell["published"] is None else f"{cell['published']:g}"


def _differences(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each setup: the order of the published placements in each mode, and of all its published cells."""
    for name, part in parts.items():
        said = []
        for row in part["rankings"]:
            if row["agrees"] is not None:
                said.append(f"in {row['mode']} the order of the placements is {'' if row['agrees'] else 'not '}theirs")
            else:
                said.append(f"in {row['mode']} fewer than two placements are published")
        own = [cell for cell in part["cells"] if cell["published"] is not None]
        first, ours = (_fastest_first(own, by)[0] for by in ("published", "live"))
        same = "which is also ours" if first is ours else f"ours is {_label(ours)}"
        said.append(f"the fastest published cell is {_label(first)}, {same}")
        yield f"- {name}: {'; '.join(said)}."


def _fastest_first(cells: Sequence[Mapping[str, Any]], by: str) -> list[Mapping[str, Any]]:
    return sorted(cells, key=lambda cell: -cell[by])


def _label(cell: Mapping[str, Any]) -> str:
    return f"{cell['placement']} {cell['mode']}"


def _chain(names: Sequence[str]) -> str:
    return " > ".join(names)


def _word(row: Mapping[str, Any]) -> str:
    return {True: "yes", False: "no", None: "not published"}[row["agrees"]]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
