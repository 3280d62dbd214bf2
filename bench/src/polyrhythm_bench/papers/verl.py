"""Simulates verl's fully asynchronous recipe (128 cards, Qwen2.5-Math-7B): seconds of a step by staleness threshold and
`require_batches`.

A part of the cluster, an eighth: 8 of 64 cards that generate, 64 of 512 prompts a step with 16 answers each, at most
28,672 tokens. Answers are streams at a generator; a step has as many updates as mini-batches over `require_batches`,
each of which begins with its own samples; the staleness threshold is `max_lag`, and partial rollout is `on_update:
continue`. The synchronous row generates on all cards and trains after the last answer. Rows without staleness wait for
the longest answer of all, so half of the cluster is simulated for them.

| part | value | source |
|---|---|---|
| a decode step | 6.2 ms | the synchronous row: 177.85 s for the longest answer, 28,672 tokens |
| more for each answer | 0.045 ms | 57 KB of keys and values a token, contexts of 3,000 tokens, an H20's 4 TB/s |
| an update, old log-probabilities | by row | printed |
| rewards, advantages | 4.0 s | the rows' steps less what they print of waiting and updates (4.0 to 4.3 s) |
| exchange of weights | 4.0 s | taken as long |
| a batch of samples, each of them pickled | 29 ms a prompt | `python bench/scripts/padded_samples.py`: 29, 32 ms |
| lengths of answers | lognormal, σ 1; the mean is fitted to staleness 0.3, else as the update | |

The rows of staleness and `require_batches` 4 train alike, so an update takes as long as it has tokens.
`require_batches` 4 is the run with staleness 0.5, averaged over 300 of its 400 steps: its times are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm_bench.workloads.answers import cut_at, run_cluster

#: Cards that generate beside the trainer, prompts of a step, answers of a prompt, mini-batches of a step; of an eighth.
CARDS, PROMPTS, GROUP, MINI_BATCHES = 64, 512, 16, 16
PART = 8
#: Tokens of the longest answer; mean before it is cut, fitted to staleness 0.3, and seconds of the updates of that row.
LONGEST, MEAN_TOKENS, FITTED_UPDATE_S = 28_672, 1_870, 103.22
#: A decode step in milliseconds, more for each answer under way; seconds of an exchange of weights, of what a step has
#: beside waiting and updates, and of making a batch of a prompt's samples.
STEP_MS, ANSWER_MS, WEIGHTS_S, REST_S, SAMPLE_S = 177.85e3 / LONGEST, 0.045, 4.0, 4.0, 0.029
#: Steps before those counted, and counted.
WARM_UP, COUNTED = 3, 5


@dataclass(frozen=True, slots=True)
class Row:
    """A printed step time. update_s: what it prints for its updates (and old log-probabilities)."""

    name: str
    published: float
    update_s: float
    staleness: float = 0.5
    require_batches: int = 4
    synchronous: bool = False
    fitted: bool = False

    @property
    def mean_tokens(self) -> float:
        """Mean length of an answer before it is cut: as the updates, of rows that train alike."""
        alike = self.require_batches == 4 and not self.synchronous
        return MEAN_TOKENS * (self.update_s / FITTED_UPDATE_S if alike else 1.0)

    @property
    def training_s(self) -> float:
        """Seconds of a step in which the trainer is at work."""
        batches_s = 0.0 if self.synchronous else PROMPTS * SAMPLE_S
        return self.update_s + REST_S + batches_s


ROWS = (
    Row("synchronous", 356.30, 53.92 + 113.81, staleness=0.0, synchronous=True),
    Row("staleness 0", 231.34, 98.77, staleness=0.0),
    Row("staleness 0.1", 171.30, 109.12, staleness=0.1),
    Row("staleness 0.3", 146.11, FITTED_UPDATE_S, staleness=0.3, fitted=True),
    Row("staleness 0.5", 150.63, 113.16),
    Row("require_batches 1", 203.47, 181.08, require_batches=1),
    Row("require_batches 2", 158.72, 128.08, require_batches=2),
    Row("require_batches 4", 124.64, 95.06),
)


def cluster_settings(row: Row, part: int = PART, seed: int = 0) -> ClusterSettings:
    """One of so many parts of the row's cluster."""
    updates = 1 if row.synchronous else MINI_BATCHES // row.require_batches
    answers = PROMPTS * GROUP // part
    return ClusterSettings.model_validate(
        {
            "seed": seed,
            "versions": WARM_UP + COUNTED,
            "scheduler": {
                "batch_size": answers // updates,
                "group_size": GROUP,
                "sync_interval": updates,
                "batching": "streams",
                "max_rows": answers,
                "max_lag": row.staleness,
                "on_update": "continue" if row.staleness else "drain",
                "streaming": not row.synchronous,
                "seed": seed,
            },
            "simulators": [
                {
                    "env_batches": round(answers * (1 + row.staleness)),
                    "tokens": cut_at(LONGEST, f"lognormal:{row.mean_tokens:.1f}steps:1.0"),
                }
            ],
            "generators": [
                {
                    "count": (2 * CARDS if row.synchronous else CARDS) // part,
                    "decode": f"{STEP_MS:.4f}ms+{ANSWER_MS}ms",
                    "apply": f"{WEIGHTS_S}s",
                }
            ],
            "trainer": {"update": f"{row.training_s / updates}s"},
        }
    )


def step_s(row: Row, part: int = 0) -> float:
    """Seconds of a step."""
    part = part or (PART if row.staleness else 2)
    return run_cluster(cluster_settings(row, part), COUNTED)[1] / COUNTED


def rows(only: tuple[Row, ...] = ROWS) -> Iterator[dict[str, Any]]:
    """A row for each printed step time."""
    for row in only:
        predicted = step_s(row)
        yield {
            "table": "verl",
            "row": f"verl, 128 cards, 7B: {row.name}, s",
            "mode": "",
            "fitted": row.fitted,
            "published": row.published,
            "predicted": predicted,
            "error": predicted / row.published - 1,
        }
