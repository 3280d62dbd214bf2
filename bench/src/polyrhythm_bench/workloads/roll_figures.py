"""Figures 7, 8, 9 and 11 and table 1 of ROLL Flash as cells: a row, a way, and what is published of the two.

Published times are shortened by one factor in each figure. What the paper does not say is chosen so that its effect can
appear, and is not fitted. Where only rollout is published, an update takes 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

from polyrhythm.config.schema import RunConfig
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm_bench.workloads import answers, turns_scene
from polyrhythm_bench.workloads.answers import MODES, AnswerMode, AnswerScene, cut_at
from polyrhythm_bench.workloads.turns_scene import TurnScene


class FigureCell(NamedTuple):
    """A scene of a row. published: the gain over the row's first way, 0 where the paper gives none; times: so many
    versions are timed for each that is asked for."""

    row: str
    way: str
    scene: AnswerScene | TurnScene
    mode: AnswerMode = MODES["queue"]
    published: float = 0.0
    times: int = 1

    def live(self, versions: int, seed: int) -> RunConfig:
        """As a run of real processes."""
        if isinstance(self.scene, TurnScene):
            return turns_scene.live(self.scene.model_copy(update={"seed": seed}), versions)
        return answers.live(self.scene.model_copy(update={"seed": seed}), self.mode, versions)

    def cluster(self, versions: int) -> ClusterSettings:
        """As a simulated cluster."""
        if isinstance(self.scene, TurnScene):
            return turns_scene.cluster(self.scene, versions)
        return answers.cluster(self.scene, self.mode, versions)


def _figure_7() -> list[FigureCell]:
    """Generation with filtered prompts, 0 and 16 prompts more than an update needs."""
    cells = []
    for prompts, published in ((8, 3.4), (16, 0.0)):
        scene = AnswerScene(prompts=prompts, solved=0.2, hopeless=0.2, tokens="lognormal:30steps:1.0", update_ms=1)
        more, row = scene.model_copy(update={"extra_prompts": 16}), f"{prompts}×8"
        cells += [FigureCell(row, "batch rollout", scene, MODES["lockstep"]), FigureCell(row, "queue", scene)]
        cells.append(FigureCell(row, "queue, 16 more prompts", more, published=published))
    return cells


def _figure_8() -> list[FigureCell]:
    """Generation by 4 generators of 32 places: mostly fewer places than answers. An unreplicated prompt takes places
    for all its answers until the longest has ended."""
    cells = []
    for prompts, group, published in ((4, 16, 0.0), (32, 16, 1.30), (64, 16, 1.84), (16, 32, 1.95)):
        scene = AnswerScene(prompts=prompts, group=group, devices=4, tokens="lognormal:20steps:1.0", update_ms=1)
        row = f"{prompts}×{group}"
        cells.append(FigureCell(row, "one request a prompt", scene))
        cells.append(FigureCell(row, "replicated", scene, MODES["replicated"], published))
    return cells


def clipped_normal(mean_ms: float, deviation_ms: float) -> str:
    """A normal distribution with 0 for what is below."""
    below = NormalDist().cdf(-mean_ms / deviation_ms)
    part = f"normal:{mean_ms:g}ms:{deviation_ms:g}ms"
    return f"mixture:{below:.9f}*constant:0ms+{1 - below:.9f}*{part}" if below > 1e-6 else part


def _figure_9() -> list[FigureCell]:
    """Rollout with environments' latencies alone; a second is 10 ms; 64 environments (512 published)."""
    cells = []
    for mean, deviation, published in ((10, 1, 1.16), (10, 7, 2.12), (10, 10, 2.46), (50, 5, 1.20)):
        scene = TurnScene(step=clipped_normal(10 * mean, 10 * deviation))
        row, together = f"normal({mean} s, {deviation} s)", scene.model_copy(update={"together": True})
        cells += [FigureCell(row, "together", together), FigureCell(row, "each alone", scene, published=published)]
    return cells


#: Long answers, or slow environments: shares chosen near those of the two tasks' baselines. A few steps are very slow.
_TASKS = {
    "long answers (SWE)": (
        TurnScene(
            tokens="lognormal:30steps:0.2",
            decode="5ms+0.05ms",
            step="mixture:0.998*lognormal:40ms:0.3+0.002*constant:300ms",
            generators=2,
            update_ms=600,
        ),
        (10.22, 8.32, 7.66, 6.09, 5.65),
    ),
    "slow environments (ALFWorld)": (
        TurnScene(
            tokens="lognormal:10steps:0.3",
            decode="5ms+0.05ms",
            step="mixture:0.995*lognormal:100ms:0.4+0.005*constant:400ms",
            generators=2,
            update_ms=600,
        ),
        (13.37, 8.44, 7.85, 5.87, 4.91),
    ),
}
_EXTRA: dict[str, object] = {"extra_groups": 1, "extra_members": 1}
_WAYS: dict[str, dict[str, object]] = {
    "together": {"together": True},
    "each alone": {},
    "each alone, redundant": _EXTRA,
    "asynchronous": {"max_lag": 1.0},
    "asynchronous, redundant": {"max_lag": 1.0, **_EXTRA},
}


def _figure_11() -> list[FigureCell]:
    """Whole training: 8 groups × 8 (8×16 published), redundant 9×9 (9×17)."""
    return [
        FigureCell(row, way, scene.model_copy(update=changes), published=hours[0] / own)
        for row, (scene, hours) in _TASKS.items()
        for (way, changes), own in zip(_WAYS.items(), hours, strict=True)
    ]


#: Asynchronous ratios of table 1, and the tokens that stand for 32K: 11K, the published mean, are 30.
RATIOS = (1, 2, 4, 8)
_32K = 90


def _ratios(row: str, size: int, longest: int, ratios: Sequence[int] = RATIOS) -> list[FigureCell]:
    """Training under growing ratios. 3 of 8 devices generate and have places for all answers at α = 2; an update takes
    as long as it has tokens."""
    tokens = "lognormal:30steps:1.0"
    update_ms = round(0.05 * size * cut_at(longest, tokens).distribution.mean)
    scene = AnswerScene(prompts=size // 8, tokens=tokens, longest=longest, places=256, update_ms=update_ms)
    modes = {ratio: AnswerMode(True, True, float(ratio), "continue") for ratio in ratios}
    return [FigureCell(row, f"α = {ratio}", scene, mode, times=2) for ratio, mode in modes.items()]


def _table_1_rollout_size() -> list[FigureCell]:
    return [cell for size in (32, 64, 128, 256) for cell in _ratios(f"{size} answers", size, _32K)]


def _table_1_length() -> list[FigureCell]:
    lengths = (4, 8, 16, 32)
    return [cell for length in lengths for cell in _ratios(f"{length}K", 256, _32K * length // 32, RATIOS[:3])]


#: What makes the cells of each figure, by name. Of table 1 there is no row of model sizes: they would only stretch all
#: times alike.
FIGURES: dict[str, Callable[[], list[FigureCell]]] = {
    "figure_7": _figure_7,
    "figure_8": _figure_8,
    "figure_9": _figure_9,
    "figure_11": _figure_11,
    "table_1_rollout_size": _table_1_rollout_size,
    "table_1_length": _table_1_length,
}
