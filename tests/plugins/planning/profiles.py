"""Recipes and profiles with plain numbers, for tests."""

from __future__ import annotations

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.plugins.planning.profile import Episodes, Machine, Profile, StationProfile, settings_digest
from polyrhythm.runtime.devices import Devices
from polyrhythm_bench.cases.placements import work

GB = 10**9
Points = tuple[tuple[float, ...], ...]
#: A version of 8 samples of 20 chunk steps, in optimizer steps of 160.
RECIPE = (
    "rollout.simulators=4",
    "rollout.env_batches=1",
    "rollout.rows=2",
    "rollout.generators=1",
    "freshness.max_lag=1",
    "batching.max_rows=64",
    "training.mini_batch_samples=8",
    "training.minibatch_steps=160",
    "training.epochs=1",
)


def recipe(*overrides: str) -> RunConfig:
    return load_config("latency", [*RECIPE, *overrides])


def profile(
    config: RunConfig,
    *,
    step: Points = ((1, 0.02), (8, 0.1)),
    passes: Points = ((1, 0.06), (64, 0.4, 4 * GB)),
    micro_batch: Points = ((8, 0.1, 8 * GB), (32, 0.4, 30 * GB), (160, 2.0, 150 * GB)),
    simulators_on: str = "cpu",
    chunk_steps: float = 20,
    fixed: float = 0.1,
    weights: int = 6 * GB,
) -> Profile:
    """A simulator, a generator of 7 GB and a trainer of 40 GB, on a machine of 16 cores and devices of 80 GB. fixed:
    seconds of a reset, an optimizer step, staging and loading weights."""
    return Profile(
        recipe=config.name,
        settings=settings_digest(config),
        date="2026-11-28T22:00:00+00:00",
        machine=Machine(cores=16, memory=500 * GB, devices=8, device="test", device_memory=80 * GB),
        episodes=Episodes(mean=chunk_steps, longest=int(4 * chunk_steps)),
        weights=weights,
        stations={
            "simulator": StationProfile(
                device=simulators_on,
                host=GB,
                resident=GB if simulators_on == "cuda" else 0,
                works={"step": work(*step), "reset": work((1, fixed))},
            ),
            "generator": StationProfile(
                device="cuda",
                resident=7 * GB,
                works={"pass": work(*passes), "apply": work((weights, fixed)), "offload": work((7 * GB, 0.3))},
            ),
            "trainer": StationProfile(
                device="cuda",
                resident=40 * GB,
                works={
                    "micro_batch": work(*micro_batch),
                    "optimizer_step": work((0, fixed)),
                    "stage": work((weights, fixed)),
                    "offload": work((40 * GB, 1.6)),
                },
            ),
        },
    )


def nodes(*devices: int) -> Devices:
    """One machine with so many devices, or several."""
    if len(devices) == 1:
        return Devices((("", devices[0]),))
    return Devices(tuple((f"node-{node}", count) for node, count in enumerate(devices)))
