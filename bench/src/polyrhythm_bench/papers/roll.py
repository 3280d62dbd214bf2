"""Simulates what ROLL Flash prints of figures 1b, 3a, 7, 8 and 10 and of table 1, on the scenes of `bench language`.

| figure | scene | not printed, and taken |
|---|---|---|
| 1b | `workloads.scaled_scenes`: an H100's bandwidth and peak | the GPU; half of a prompt's answers are equally long |
| 3a, table 1 | the same with 40 GPUs and 256 answers an update, σ 1 | the same |
| 7 | 8 prompts × 8 answers, 16 more prompts | the share of prompts that the filter drops: fitted |
| 8 | `workloads.roll_figures`: 4 generators of 32 places | the workers, lengths |
| 10 | 32 × 8 to 36 × 12 environments | turns: 4, as 36 × 12 takes 45 s; one step in 500 fails; how long is fitted |

In table 1 the ratio that is needed is the least with 90% of the largest gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm_bench.workloads import answers, turns_scene
from polyrhythm_bench.workloads.answers import MODES, AnswerMode, AnswerScene
from polyrhythm_bench.workloads.roll_figures import FIGURES
from polyrhythm_bench.workloads.scaled_scenes import GROUP, LONGEST, PROMPTS, TOKENS_A_STEP, scaled, with_contexts
from polyrhythm_bench.workloads.turns_scene import TurnScene

#: GPUs and answers of figure 3a; its rows: GPUs that train, asynchronous ratio, gain over ROLL-Sync.
GPUS, ANSWERS = 40, 256
SPLITS = ((32, 1, 1.25), (24, 1, 1.28), (24, 2, 1.64), (16, 2, 2.0))
#: Table 1: ratios that are tried, answers of an update, longest answers in thousands of tokens.
RATIOS, SIZES, LENGTHS = (1, 2, 4, 8, 16), (32, 64, 128, 256), (4, 8, 16, 32)
#: Gain of figure 7, and the share of prompts that is dropped, fitted to it.
FILTERED, DROPPED = 125 / 37, 0.02
#: Gains of figure 10 over 32 × 8, by groups and members; seconds of 32 × 8; turns of an episode, and their times.
REDUNDANT = {(36, 9): 3.10, (36, 11): 5.24, (36, 12): 5.45}
BASELINE_S, TURNS = 243, 4
FAIL_SLOW = "mixture:0.998*normal:10s:5s+0.002*constant:265s"


def asynchronous(ratio: float) -> AnswerMode:
    return AnswerMode(True, True, ratio, "continue")


def seconds(settings: ClusterSettings, counted: int) -> float:
    """Virtual seconds of one of the last `counted` versions."""
    return answers.run_cluster(settings, counted)[1] / counted


def rows(thorough: bool = True) -> Iterator[dict[str, Any]]:
    """A row for each printed gain. thorough: figures 1b, 8 and 10 too, which take a minute of CPU."""
    yield from figure_3a()
    yield figure_7()
    if thorough:
        yield from figure_1b()
        yield from figure_8()
        yield from figure_10()


def figure_1b(before: int = 2, counted: int = 3) -> Iterator[dict[str, Any]]:
    """Asynchronous training (α = 2) over Sync-Naive on 128 GPUs, and over itself on 16. The GPUs that train are those
    of the best split (bench/results/language.md)."""

    def version_s(model: str, gpus: int, training: int, mode: AnswerMode) -> float:
        scene = with_contexts(scaled(model, gpus, training), model)
        return seconds(answers.cluster(scene, mode, before + counted), counted)

    for model, published in (("base", 2.24), ("think", 2.13)):
        most = version_s(model, 128, 32, MODES["alpha_2_continue"])
        name = f"figure 1b, {model}"
        yield _row(f"{name}: asynchronous, 128 GPUs", published, version_s(model, 128, 32, MODES["lockstep"]) / most)
        if model == "think":
            least = version_s(model, 16, 4, MODES["alpha_2_continue"])
            yield _row(f"{name}: 8 times the GPUs", 7.6, least / most)


def ablation_scene(training: int, size: int = ANSWERS, thousands: int = 30) -> AnswerScene:
    """The scene of figure 3a and table 1 with `size` answers an update, of at most so many thousands of tokens."""
    scene = with_contexts(scaled("think", GPUS, training), "think")
    prompts, longest = max(1, size // GROUP), min(LONGEST, thousands * 1024) // TOKENS_A_STEP
    shorter = scene.model_copy(update={"longest": longest})
    share = prompts / PROMPTS * shorter.mean_tokens / scene.mean_tokens
    return shorter.model_copy(update={"prompts": prompts, "update_ms": max(1, round(scene.update_ms * share))})


def ablation_s(scene: AnswerScene, mode: AnswerMode, before: int = 3, counted: int = 8) -> float:
    return seconds(answers.cluster(scene, mode, before + counted), counted)


def figure_3a(counted: int = 8) -> Iterator[dict[str, Any]]:
    """Gain over ROLL-Sync (queueing and replication, all GPUs in turn) by the split of 40 GPUs."""
    sync = ablation_s(ablation_scene(GPUS // 2), MODES["replicated"], counted=counted)
    for training, ratio, published in SPLITS:
        found = sync / ablation_s(ablation_scene(training), asynchronous(ratio), counted=counted)
        yield _row(f"figure 3a, {training} train, {GPUS - training} infer: α = {ratio}", published, found)


def needed(size: int = ANSWERS, thousands: int = 30) -> int:
    """Least ratio with 90% of the largest gain, with 24 GPUs that train and 16 that infer."""
    scene = ablation_scene(24, size, thousands)
    taken = {ratio: ablation_s(scene, asynchronous(ratio)) for ratio in RATIOS}
    return min(ratio for ratio, own in taken.items() if min(taken.values()) / own >= 0.9)


def table_1() -> Iterator[dict[str, Any]]:
    """Table 1's trends (4, 2, 2, 2 with the rollout size; 1, 1, 1, 2 with the length), and its least ratio, 2."""
    sizes, lengths = [needed(size) for size in SIZES], [needed(thousands=length) for length in LENGTHS]
    yield _claim("larger rollouts need less", sizes, sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1])
    yield _claim("longer answers need more", lengths, lengths == sorted(lengths) and lengths[0] < lengths[-1])
    yield _claim("α = 2 is enough for 256 answers of 32K", [sizes[-1]], sizes[-1] <= 2)


def figure_7(before: int = 5, counted: int = 60) -> dict[str, Any]:
    """Generation with filtered prompts: queueing with 16 more prompts over a batch at a time."""
    half = DROPPED / 2
    scene = AnswerScene(prompts=8, solved=half, hopeless=half, tokens="lognormal:30steps:1.0", update_ms=1)
    batch = seconds(answers.cluster(scene, MODES["lockstep"], before + counted), counted)
    more = scene.model_copy(update={"extra_prompts": 16})
    queued = seconds(answers.cluster(more, MODES["queue"], before + counted), counted)
    return _row("figure 7, 8 × 8: queue, 16 more prompts", FILTERED, batch / queued, fitted=True)


def figure_8(before: int = 5, counted: int = 20) -> Iterator[dict[str, Any]]:
    """Prompt replication over a request for each prompt."""
    first = 0.0
    for cell in FIGURES["figure_8"]():
        if cell.way != "replicated":
            first = seconds(cell.cluster(before + counted), counted)
        elif cell.published:
            gain = first / seconds(cell.cluster(before + counted), counted)
            yield _row(f"figure 8, {cell.row}: replicated", cell.published, gain)


def figure_10(before: int = 2, counted: int = 10) -> Iterator[dict[str, Any]]:
    """Redundant groups and members over 32 × 8, whose seconds are fitted."""

    def update_s(groups: int, members: int) -> float:
        extra = {"extra_groups": groups - 32, "extra_members": members - 8}
        scene = TurnScene(groups=32, group=8, turns=TURNS, step=FAIL_SLOW, **extra)
        return seconds(turns_scene.cluster(scene, before + counted), counted)

    first = update_s(32, 8)
    yield _row("figure 10: 32 × 8, s", BASELINE_S, first, fitted=True)
    for (groups, members), published in REDUNDANT.items():
        yield _row(f"figure 10: {groups} × {members}", published, first / update_s(groups, members))


def _row(name: str, published: float, predicted: float, *, fitted: bool = False) -> dict[str, Any]:
    return {
        "table": "ROLL Flash",
        "row": f"ROLL Flash, {name}",
        "mode": "",
        "fitted": fitted,
        "published": published,
        "predicted": predicted,
        "error": predicted / published - 1,
    }


def _claim(name: str, simulated: list[int], holds: bool) -> dict[str, Any]:
    return {"claim": f"ROLL Flash, table 1: {name}", "simulated": [float(each) for each in simulated], "holds": holds}
