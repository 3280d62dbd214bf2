"""ROLL Flash's figure 1b: asynchronous training over lock-step by the number of GPUs (`workloads.scaled_scenes`).

All sizes are simulated, with a generator station for each GPU. The largest also runs live, with engines that sleep: a
station stands for 16 GPUs there, once more simulated beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from polyrhythm_bench.cases.language_schedules import SPEEDUP
from polyrhythm_bench.harness.version_cost import measure
from polyrhythm_bench.workloads.answers import MODES, cluster, live, run_cluster
from polyrhythm_bench.workloads.scaled_scenes import GPUS, MODELS, TRAINING_SHARES, scaled

log = logging.getLogger(__name__)

_FIRST, _MODE = "lockstep", "alpha_2_continue"
_PER_STATION = 16
#: Versions that are simulated before counting begins, and those that are counted.
_WARM_UP, _COUNTED = 5, 10


def run(model: str, versions: int, repeats: int, gpus: Sequence[int] = GPUS) -> dict[str, Any]:
    """What `summarise` returns, and `live`, on the most GPUs with the split that is best in the simulation: seconds per
    version as of the GPUs, medians over turns, and the same simulated with as few stations. same_tokens: most GPUs,
    where all answers to a prompt are equally long."""
    seconds = {number: simulated(model, number) for number in gpus}
    found = summarise(model, seconds)
    found["same_tokens"] = summarise(model, {max(gpus): simulated(model, max(gpus), same_tokens=1.0)})["gpus"]
    best = found["gpus"][max(gpus)]["training"]
    scene = scaled(model, max(gpus), best, per_station=_PER_STATION)
    turns: dict[str, list[float]] = {name: [] for name in (_FIRST, _MODE)}
    for turn in range(repeats):
        for name, own in turns.items():
            seeded = scene.model_copy(update={"seed": turn})
            cost = measure(live(seeded, MODES[name], versions), versions, validated=False)
            own.append(cost.seconds_per_version * MODELS[model].shortened)
            log.info("turn %d, %s: %.0f s per version, others %.1f cores", turn + 1, name, own[-1], cost.others_cores)
    twin = {name: _seconds(model, max(gpus), best, name, per_station=_PER_STATION) for name in turns}
    speedup = median(first / own for first, own in zip(turns[_FIRST], turns[_MODE], strict=True))
    beside = {
        "seconds": {name: median(own) for name, own in turns.items()},
        "seconds_by_turn": turns,
        "speedup": speedup,
        "simulated": twin,
        "simulated_speedup": twin[_FIRST] / twin[_MODE],
    }
    return {"scene": scene.model_dump(), **found, "live": beside, "within_limits": speedup >= SPEEDUP}


def simulated(model: str, gpus: int, *, same_tokens: float = 0.0) -> dict[int, float]:
    """Seconds per version by the GPUs that train; 0: in lock-step. same_tokens: as in `AnswerScene`."""
    found = {0: _seconds(model, gpus, gpus // 2, _FIRST, same_tokens=same_tokens)}
    for share in TRAINING_SHARES:
        training = round(share * gpus)
        found[training] = _seconds(model, gpus, training, _MODE, same_tokens=same_tokens)
        log.info("%s, %d GPUs, %d train: %.0f s, lock-step %.0f s", model, gpus, training, found[training], found[0])
    return found


def _seconds(
    model: str, gpus: int, training: int, mode: str, *, per_station: int = 1, same_tokens: float = 0.0
) -> float:
    scene = scaled(model, gpus, training, per_station=per_station).model_copy(update={"same_tokens": same_tokens})
    _, seconds = run_cluster(cluster(scene, MODES[mode], _WARM_UP + _COUNTED), _COUNTED)
    return seconds / _COUNTED * MODELS[model].shortened


def summarise(model: str, seconds: Mapping[int, Mapping[int, float]]) -> dict[str, Any]:
    """By number of GPUs: lockstep, asynchronous: seconds per version; training: GPUs that train in the best split;
    speedup; scaling, lockstep_scaling: throughput over that of the fewest GPUs; seconds: by split, as given."""
    rows: dict[int, dict[str, Any]] = {}
    fewest = min(seconds)
    for gpus, found in seconds.items():
        training = min((split for split in found if split), key=lambda split: found[split])
        rows[gpus] = {
            "lockstep": found[0],
            "asynchronous": found[training],
            "training": training,
            "speedup": found[0] / found[training],
            "seconds": dict(found),
        }
    for own in rows.values():
        own["scaling"] = rows[fewest]["asynchronous"] / own["asynchronous"]
        own["lockstep_scaling"] = rows[fewest]["lockstep"] / own["lockstep"]
    return {"published": MODELS[model].published, "gpus": rows}
