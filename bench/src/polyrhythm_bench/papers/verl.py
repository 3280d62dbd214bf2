"""Seconds of a step of verl's fully asynchronous recipe (128 cards, 7B): arithmetic on its printed stage times, without
the simulated cluster.

On 64 cards a step takes as long as the slower of the two: its samples' generation, or its update, as printed in the
row, and the exchange of weights. Generation and exchange are both fitted, to the row with staleness 0.3: its step, and
what its update and waiting leave of that.
Without staleness the batch's tail is waited for: generation takes what the synchronous row prints, then the last of
four updates follows. The synchronous row is the sum of its stages.

Rows of 32 and 64 cards are not predicted: their stage times do not scale with the cards (updates 313.81 s on 32 cards
and 269.80 s on 16, generation 150.72 s on 64 and 177.85 s on 128), as answers differ in length between the runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Stages of the synchronous row: generation, old log-probabilities, update.
STAGES_S = (177.85, 53.92, 113.81)
#: Name, seconds of a step, printed seconds of its update, and whether it is fitted.
ASYNCHRONOUS = (
    ("staleness 0.1", 171.30, 109.12, False),
    ("staleness 0.3", 146.11, 103.22, True),
    ("staleness 0.5", 150.63, 113.16, False),
    ("require_batches 1", 203.47, 181.08, False),
    ("require_batches 2", 158.72, 128.08, False),
    ("require_batches 4", 124.64, 95.06, False),
)
#: Seconds in which weights are exchanged: 146.11 less generation that was waited for (38.88) and the update.
WEIGHTS_S = 146.11 - 38.88 - 103.22
#: Seconds of a step and of its four updates without staleness.
STREAM_S, STREAM_UPDATE_S, UPDATES = 231.34, 98.77, 4


def rows() -> Iterator[dict[str, Any]]:
    """A row for each printed step time."""
    yield _row("synchronous", 356.30, sum(STAGES_S))
    yield _row("staleness 0", STREAM_S, STAGES_S[0] + STREAM_UPDATE_S / UPDATES + WEIGHTS_S)
    generation = next(step for _, step, _, fitted in ASYNCHRONOUS if fitted)
    for name, step, update, fitted in ASYNCHRONOUS:
        yield _row(name, step, max(generation, update + WEIGHTS_S), fitted=fitted)


def _row(name: str, published: float, predicted: float, *, fitted: bool = False) -> dict[str, Any]:
    return {
        "table": "verl",
        "row": f"verl, 128 cards, 7B: {name}, s",
        "mode": "",
        "fitted": fitted,
        "computed": True,
        "published": published,
        "predicted": predicted,
        "error": predicted / published - 1,
    }
