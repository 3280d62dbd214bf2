"""Signs and rankings that the papers state in words or by their tables, held against the simulated clusters.

`simulated` gives the numbers that decide, `holds` the verdict. Figures without printed numbers are here alone:
RL-VLA3's figures 8 and 9, RLinf's figure 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from polyrhythm_bench.papers.published import PaperData, PaperRow
from polyrhythm_bench.papers.stages import CHUNK_STEPS, Times, cluster_settings, measured, simulate

#: Latency thresholds of figure 8, and its numbers of env batches.
WAITS_MS, BATCHES = (0.0, 100.0, 200.0, 300.0, 500.0, 1000.0), (2, 3, 6)
#: Rollout GPUs of figure 9, of 8; changes of the scheduler by kind of training.
ROLLOUT_GPUS = (4, 5, 6)
TRAINING: dict[str, dict[str, Any]] = {
    "none": {},
    "basic": {"on_update": "continue", "streaming": True},
    "streamer": {"on_update": "continue", "streaming": True, "parts": True},
}

Claim = dict[str, Any]


def claims(data: PaperData, times: Mapping[str, Times], rates: Mapping[str, float]) -> Iterator[Claim]:
    """Every claim. rates: simulated transitions per second by the row's name."""

    def rate(name: str) -> float:
        return rates[name]

    maniskill, robocasa = "ManiSkill, pi0.5, GRPO", "RoboCasa, pi0, PPO"
    for count in (2, 4):
        pair = [rate(f"{maniskill}: colocated, {count} batches, {mode}") for mode in ("baseline", "rollout")]
        yield _claim(f"table 2: colocated, {count} batches: asynchronous rollout is slower", pair, pair[1] < pair[0])
    pair = [rate(f"{maniskill}: {place}") for place in ("colocated, 1 batch, baseline", "hybrid, 2 batches, full")]
    yield _claim("table 2: hybrid, asynchronous, is the best placement", pair, pair[1] > pair[0])
    pair = [rate(f"{robocasa}: {place}, 2 batches, full") for place in ("hybrid", "colocated")]
    yield _claim("table 3: colocated is the best placement", pair, pair[1] > pair[0])
    for name in ("LIBERO, GR00T N1.5, PPO", "Meta-World, pi0, PPO"):
        four = [rate(f"{name}: colocated, 4 batches, {mode}") for mode in ("baseline", "rollout", "full")]
        yield _claim(f"{name}: each asynchrony gains", four, four[0] < four[1] < four[2])
    yield from figure_8(list(batching(data, times["robocasa"])))
    yield from figure_9(data, times["b"])
    yield from rlinf(data, times)


def batching(data: PaperData, times: Times) -> Iterator[dict[str, float]]:
    """RoboCasa, hybrid, fully asynchronous, by most env batches of a pass and longest wait for them (figure 8)."""
    example = next(row for row in data.rows if row.table == "figure 8" and not row.wait_ms)
    for batches in BATCHES:
        for wait_ms in WAITS_MS:
            row = replace(example, max_batches=batches, wait_ms=wait_ms)
            yield {"max_batches": batches, "wait_ms": wait_ms, "throughput": simulate(row, times).throughput}


def figure_8(grid: list[dict[str, float]]) -> Iterator[Claim]:
    """The paper's example: up to three env batches a pass."""
    own = [cell["throughput"] for cell in grid if cell["max_batches"] == 3]
    yield _claim("figure 8: up to 3: rises with the threshold, then falls", own, own[0] < max(own) > own[-1])


def figure_9(data: PaperData, times: Times) -> Iterator[Claim]:
    """LIBERO + OpenVLA-OFT by rollout GPUs: throughput over that without asynchrony."""
    example = next(row for row in data.rows if row.setup.key == "b8" and row.mode == "full")
    gains: dict[int, dict[str, float]] = {}
    for gpus in ROLLOUT_GPUS:
        panel = replace(example, rollout_gpus=gpus, envs=64 * gpus)
        modes = {
            f"{rollout} {kind}": trained(replace(panel, mode=mode), times, kind)  # type: ignore[arg-type]
            for rollout, mode in (("lock-step", "baseline"), ("dynamic", "rollout"))
            for kind in TRAINING
            if kind != "streamer" or mode == "rollout"  # lock-step rows end together
        }
        gains[gpus] = {name: value / modes["lock-step none"] for name, value in modes.items()}
    for gpus, own in gains.items():
        both, rollout, training = own["dynamic basic"], own["dynamic none"], own["lock-step basic"]
        place = f"figure 9, {gpus} : {8 - gpus}"
        yield _claim(f"{place}: both together are best", [rollout, training, both], both > max(rollout, training))
        yield _claim(f"{place}: training gains more than rollout", [rollout, training], training > rollout)
        alone = own["dynamic streamer"]
        yield _claim(f"{place}: streamer training gains little over basic", [both, alone], alone < 1.05 * both)
    rollouts = [own["dynamic none"] for own in gains.values()]
    yield _claim("figure 9: rollout asynchrony gains most at 1:1", rollouts, rollouts[0] == max(rollouts))


def trained(row: PaperRow, times: Times, kind: str, chunk_steps: int = CHUNK_STEPS) -> float:
    """Throughput with this kind of training."""
    settings = cluster_settings(row, times, chunk_steps)
    settings = settings.model_copy(update={"scheduler": replace(settings.scheduler, **TRAINING[kind])})
    return measured(row, settings, chunk_steps).throughput


def rlinf(data: PaperData, times: Mapping[str, Times]) -> Iterator[Claim]:
    """RLinf's figure 9, with the environments of its table 3 and our stage times of the same simulators."""
    for key, envs, better, worse in (
        ("maniskill", 256, "hybrid", "separate"),
        ("libero", 512, "colocated", "hybrid"),
    ):
        example = next(row for row in data.rows if row.setup.key == key and row.batches == 2 and row.mode == "baseline")
        pair = []
        for placement in (worse, better):
            devices = {"colocated": 8, "hybrid": 6, "separate": 4}[placement]
            row = replace(example, placement=placement, envs=envs // devices // 2 * 2 * devices)  # type: ignore[arg-type]
            pair.append(simulate(row, times[key]).throughput)
        yield _claim(f"RLinf, figure 9, {key}: {better} is faster than {worse}", pair, pair[1] > pair[0])


def _claim(name: str, simulated: list[float], holds: bool) -> Claim:
    return {"claim": name, "simulated": simulated, "holds": holds}
